// A layout as SVG.
import { type Model, byFormat, isCast, sums } from "./data";
import { s } from "./dom";
import type { Scale } from "./colours";
import type { Layout, Path, Placed } from "./layout";
import type { Box, Link } from "./tree";
import { counted, formatClass, inBytes, shortOp } from "./words";

// What stands on a box of two runs: `kind` is a class of the style; `also`: in which format the partner computes.
export interface Mark { kind: string; text: string; also: string }
export interface Marks { of: (box: Box) => Mark | null }
export const MARKED = 17; // by so much a box is higher for it

const LETTERS = 30;
let drawings = 0;
export const LABEL = 138;
const cut = (text: string): string => (text.length > LETTERS ? `…${text.slice(1 - LETTERS)}` : text);

export function titleOf(model: Model, box: Box): string {
  if (box.kind !== "call") return box.title;
  const call = model.calls[box.calls[0]!]!;
  const inside = box.title ? `${box.title}: ` : "";
  return `${inside}${shortOp(call.op)}${call.times > 1 ? ` × ${call.times}` : call.label && call.label !== "#1" ? ` ${call.label}` : ""}`;
}

export function subtitleOf(model: Model, box: Box, colours: Scale): string {
  const said = colours.text(box);
  if (said) return said;
  if (box.kind === "call") {
    const call = model.calls[box.calls[0]!]!;
    const formats = call.input_formats && call.computes && call.input_formats !== call.computes ? `${call.input_formats} → ${call.computes}` : call.computes;
    return formats || (call.result ? `gives ${call.result}` : "no floating tensor");
  }
  const found = sums(model, box.calls);
  return found.casts > 0 ? `${counted(found.casts, "cast")}, ${inBytes(found.castBytes)}` : counted(found.calls, "call");
}

const castsOf = (link: Link) => link.edges.filter(isCast);
export const labelled = (link: Link): boolean => castsOf(link).length > 0 && !link.from.startsWith("source");

// The shape of what a link between two calls carries; where there are several values, that of one alone says little.
export function shapeOf(link: Link): string {
  const shapes = new Set(link.edges.map((edge) => edge.shape));
  return shapes.size === 1 && !labelled(link) ? [...shapes][0]! : "";
}

// What a link carries: each kind of value once, with its format and shape.
function carried(link: Link): string {
  const kinds = link.edges.map((edge) => `${isCast(edge) ? `${edge.src} → ${edge.dst}` : edge.src} ${edge.shape}`.trim());
  const each = [...new Set(kinds)];
  return each.slice(0, 6).join("\n") + (each.length > 6 ? `\nand ${each.length - 6} more` : "");
}

function line(path: Path): string {
  const [first, ...rest] = path.points;
  if (!first) return "";
  const points = rest.map((p) => `${p.x.toFixed(1)} ${p.y.toFixed(1)}`);
  if (points.length < 2) return `M${first.x} ${first.y}L${points.join(" ")}`;
  let text = `M${first.x.toFixed(1)} ${first.y.toFixed(1)}`;
  for (let i = 0; i + 1 < rest.length; i++) {
    const a = rest[i]!, b = rest[i + 1]!;
    const last = i + 2 === rest.length;
    const x = last ? b.x : (a.x + b.x) / 2, y = last ? b.y : (a.y + b.y) / 2;
    text += `Q${a.x.toFixed(1)} ${a.y.toFixed(1)} ${x.toFixed(1)} ${y.toFixed(1)}`;
  }
  return text;
}

function drawLink(path: Path, most: number, arrow: string): SVGElement {
  const { link } = path;
  const casts = castsOf(link);
  const share = link.bytes > 0 ? Math.log2(1 + link.bytes) / Math.log2(1 + most) : 0;
  const group = s("g", { class: `link ${casts.length > 0 ? `cast ${formatClass(casts[0]!.dst)}` : ""} ${link.order ? "order" : ""}` });
  group.append(s("path", { d: line(path), "stroke-width": link.order ? 1 : (1 + 5 * share * share * share).toFixed(1), "marker-end": `url(#${arrow})` }));
  const bytes = casts.reduce((sum, cast) => sum + cast.bytes, 0);
  const kinds = [...new Set(casts.map((cast) => `${cast.src} → ${cast.dst}`))];
  const text = casts.length > 0 ? `${kinds.length > 1 ? counted(casts.length, "cast") : kinds[0]} ${inBytes(bytes)}` : inBytes(link.bytes);
  group.append(s("title", {}, link.order ? "ran next" : `${carried(link)}\n${inBytes(link.bytes)}`));
  if (labelled(link))
    group.append(
      s("rect", { class: "label", x: path.label.x - LABEL / 2, y: path.label.y - 9, width: LABEL, height: 18, rx: 9 }),
      s("text", { class: "label", x: path.label.x, y: path.label.y + 4, "text-anchor": "middle" }, text));
  else if (shapeOf(link))
    group.append(s("text", { class: "label shape", x: path.label.x + 5, y: path.label.y + 4 }, shapeOf(link)));
  return group;
}

function drawBox(model: Model, placed: Placed, colours: Scale, selected: string, marks: Marks | null): SVGGElement {
  const { box, width, height } = placed;
  const x = placed.x - width / 2, y = placed.y - height / 2;
  const small = box.kind === "source" || box.kind === "outside";
  const bad = box.calls.some((index) => model.calls[index]!.finding);
  const colour = box.kind === "source" ? formatClass(box.edge!.src) : small ? "" : colours.classOf(box);
  const mark = small ? null : marks?.of(box) ?? null;
  const formats = small ? "" : subtitleOf(model, box, colours);
  const title = cut(titleOf(model, box)), subtitle = mark?.also ? `${formats} (${mark.also})` : formats;
  const opens = box.kind === "module" ? ", a module" : box.kind === "fold" ? ", modules that are alike" : "";
  const group = s("g", {
    class: `box ${box.kind} ${colour} ${bad ? "bad" : ""} ${box.key === selected ? "selected" : ""} ${mark ? `marked-${mark.kind}` : ""}`, "data-key": box.key,
    tabindex: -1, role: "button", "aria-label": `${titleOf(model, box)}${opens}${subtitle ? `, ${subtitle}` : ""}${mark ? `, ${mark.text}` : ""}${bad ? ", has a finding" : ""}`,
  });
  if (box.kind === "fold")
    for (const shift of [6, 3])
      group.append(s("rect", { class: "behind", x: x + shift, y: y + shift, width, height, rx: 8 }));
  group.append(s("rect", { class: "body", x, y, width, height, rx: small ? height / 2 : box.kind === "call" ? 4 : 8 }));
  if (small) group.append(s("text", { class: "small", x: placed.x, y: placed.y + 4, "text-anchor": "middle" }, title));
  else {
    group.append(s("text", { class: "title", x: x + 13, y: y + 20 }, title), s("text", { class: "sub", x: x + 13, y: y + 37 }, cut(subtitle)));
    if (mark)
      group.append(s("rect", { class: `mark ${mark.kind}`, x: x + 13, y: y + 45, width: 9, height: 9, rx: 4.5 }),
        s("text", { class: "sub", x: x + 27, y: y + 54 }, mark.text.length > LETTERS ? `${mark.text.slice(0, LETTERS - 1)}…` : mark.text));
    if (box.kind === "call") group.append(s("rect", { class: "stripe", x, y, width: 5, height, rx: 2 }));
    else group.append(...formatStrip(model, box, x + 12, y + height - 14, width - 24));
    if (bad) group.append(s("circle", { class: "flag", cx: x + width - 4, cy: y + 4, r: 7 }), s("text", { class: "flag", x: x + width - 4, y: y + 8, "text-anchor": "middle" }, "!"));
  }
  group.append(s("title", {}, [titleOf(model, box), subtitle, mark?.text].filter(Boolean).join("\n")));
  return group;
}

// A module that is open in its place: a frame with its name, which is clicked as a box is.
function drawGroup(placed: Placed, selected: string): SVGGElement {
  const { box, width, height } = placed;
  const x = placed.x - width / 2, y = placed.y - height / 2;
  return s("g", { class: `box group ${box.key === selected ? "selected" : ""}`, "data-key": box.key, tabindex: -1, role: "button",
    "aria-label": `${box.title}, a module, open here` },
  s("rect", { class: "body", x, y, width, height, rx: 10 }),
  s("text", { class: "title", x: x + 10, y: y + 15 }, box.title.length * 7 > width ? `…${box.title.slice(-Math.floor(width / 8))}` : box.title),
  s("title", {}, box.path));
}

function formatStrip(model: Model, box: Box, x: number, y: number, width: number): SVGElement[] {
  const parts = byFormat(model, box.calls);
  const whole = parts.reduce((sum, [, n]) => sum + n, 0) || 1;
  let at = x;
  return parts.map(([name, n]) => {
    const made = s("rect", { class: `strip ${formatClass(name)}`, x: at.toFixed(1), y, width: ((width * n) / whole).toFixed(1), height: 6 });
    at += (width * n) / whole;
    return made;
  });
}

export function draw(model: Model, layout: Layout, colours: Scale, selected: string, marks: Marks | null = null): SVGSVGElement {
  const arrow = `arrow${drawings++}`; // two drawings on one page have each its own
  const most = Math.max(1, ...layout.paths.map((path) => path.link.bytes));
  const marker = s("marker", { id: arrow, class: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 11, markerHeight: 11, orient: "auto-start-reverse", markerUnits: "userSpaceOnUse" },
    s("path", { d: "M0 0L8 4L0 8z" }));
  const made = s("svg", { class: "canvas", role: "group", "aria-label": "The calls and modules that stand here" }, s("defs", {}, marker));
  made.append(
    s("g", { class: "groups" }, ...layout.groups.map((placed) => drawGroup(placed, selected))),
    s("g", { class: "links" }, ...layout.paths.map((path) => drawLink(path, most, arrow))),
    s("g", { class: "boxes" }, ...layout.boxes.map((placed) => drawBox(model, placed, colours, selected, marks))));
  return made;
}
