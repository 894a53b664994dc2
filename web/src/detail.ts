// What is known of the selected box, and the rule that would change it.
import { type Call, type Edge, type Model, byFormat, isCast, sums } from "./data";
import { button, h } from "./dom";
import { ruleBlock, shareBar } from "./overview";
import type { Box } from "./tree";
import {
  castText, changingRule, counted, errorText, formatClass, identity, inBytes, inCount, inTime, packageFile, ruleText, shortOp,
} from "./words";

export interface Doings {
  open: (box: Box) => void;
  unfold: (box: Box) => void;
  inPlace: (box: Box) => void; // open or close a module where it stands
  isOpen: (box: Box) => boolean;
  histogram: (call: Call) => void;
  has: (call: Call) => boolean;
  narrow: (box: Box) => void; // show only this module
  more: (box: Box) => Node[]; // what is known besides
}

export function rows(pairs: [string, string | Node | null | false][]): HTMLElement {
  return h("dl", { class: "details" },
    ...pairs.flatMap(([name, value]) => (value ? [h("dt", {}, name), h("dd", {}, value)] : [])));
}

const format = (names: string): Node | null =>
  names ? h("span", {}, ...names.split(",").map((name) => h("b", { class: `chip ${formatClass(name)}` }, name))) : null;

const place = (call: Call): Node | null =>
  call.file ? h("span", { title: `${call.file}:${call.line}` }, `${packageFile(call.file)}:${call.line}`) : null;

export function detail(model: Model, box: Box | null, opened: Box, doings: Doings): HTMLElement {
  const aside = h("aside", { class: "detail", "aria-label": "Details of the selection", "aria-live": "polite" });
  if (!box) {
    aside.append(...ofModule(model, opened, null), ...doings.more(opened),
      h("p", { class: "quiet hint" }, "Click a box, or move to one with the arrow keys. A double click, or Enter, opens a module."));
  } else if (box.kind === "call") aside.append(...ofCall(model, model.calls[box.calls[0]!]!, box, doings));
  else if (box.edge) aside.append(...ofCast(model, box.edge));
  else aside.append(...ofModule(model, box, doings));
  return aside;
}

function ofCall(model: Model, call: Call, box: Box, doings: Doings): Node[] {
  const casts = model.castsInto[call.index]!;
  const parts: Node[] = [
    h("h3", {}, `${shortOp(call.op)} ${call.label}`),
    h("p", { class: "path" }, identity(call)),
  ];
  if (call.finding) parts.push(h("p", { class: "finding" }, call.finding));
  parts.push(...doings.more(box));
  parts.push(rows([
    ["input dtype", format(call.input_formats)],
    ["compute dtype", format(call.computes)],
    ["output dtype", format(call.result)],
    ["action", call.action],
    ["why", call.reason],
    ["rule", call.rule],
    ["line", place(call)],
    ["times", call.times > 1 ? String(call.times) : ""],
    ["bytes", call.bytes === null ? "" : inBytes(call.bytes)],
    ["multiplications", call.multiplications ? inCount(call.multiplications) : ""],
    ["time", call.ns === null ? "" : inTime(call.ns)],
    ["local error", call.local === null ? "" : errorText(call.local)],
    ["propagated error", call.propagated === null ? "" : errorText(call.propagated)],
    ["total error", call.total === null ? "" : errorText(call.total)],
    ["verdict", call.verdict],
    ...call.facts,
  ]));
  if (casts.length > 0)
    parts.push(h("h4", {}, "Casts for it"),
      h("ul", { class: "casts" }, ...casts.map((cast) => h("li", {}, h("b", {}, cast.argument), ` (${cast.kind}) ${castText(cast)}`))));
  const links = [doings.has(call) && button("Its exponents", () => doings.histogram(call), { class: "link" }),
    call.path && button("Only its module", () => doings.narrow(box), { class: "link", title: "Restrict graph, search, findings and tables to it (o)" })];
  parts.push(h("p", { class: "actions" }, ...links));
  parts.push(...changes(call));
  if (call.path && changingRule(call, true))
    parts.push(h("details", {}, h("summary", {}, "In every module"), ruleBlock(ruleText(changingRule(call, true)!))));
  return parts;
}

function ofCast(model: Model, edge: Edge): Node[] {
  const call = model.calls[edge.end]!;
  return [
    h("h3", {}, `Cast of ${edge.argument}`),
    h("p", { class: "path" }, `for ${identity(call)}`),
    rows([["from", format(edge.src)], ["to", format(edge.dst)], ["shape", edge.shape], ["what", edge.kind], ["how", edge.how],
      ["times", edge.times > 1 ? String(edge.times) : ""], ["moves", inBytes(edge.bytes)],
      ["why", call.reason], ["rule", call.rule], ["line", place(call)]]),
    ...changes(call),
  ];
}

function changes(call: Call): Node[] {
  const rule = changingRule(call, false);
  return rule ? [h("h4", {}, "The rule that would change it"), ruleBlock(ruleText(rule))] : [];
}

function ofModule(model: Model, box: Box, doings: Doings | null): Node[] {
  const found = sums(model, box.calls);
  const kinds = new Map<string, { times: number; bytes: number }>();
  for (const index of box.calls)
    for (const cast of model.castsInto[index]!.filter(isCast)) {
      const key = `${cast.src} → ${cast.dst}, ${cast.kind}`;
      const sum = kinds.get(key) ?? { times: 0, bytes: 0 };
      kinds.set(key, { times: sum.times + cast.times, bytes: sum.bytes + cast.bytes });
    }
  const parts: Node[] = [h("h3", {}, box.title)];
  if (box.kind === "outside") {
    parts.push(h("p", { class: "quiet" }, "Calls outside of this module that give it what it reads, or read what it gives."));
    return parts;
  }
  parts.push(h("p", { class: "path" }, box.kind === "fold" ? `${counted(box.members.length, "module")} that do the same, in the same formats` : box.path));
  if (doings) {
    const actions = h("p", { class: "actions" },
      button(box.kind === "fold" ? "Open the first" : "Open", () => doings.open(box), { class: "primary" }));
    if (box.kind === "module") actions.append(button(doings.isOpen(box) ? "Close here" : "Open here", () => doings.inPlace(box), { title: "Beside what stands around it (i)" }));
    if (box.kind === "fold") actions.append(button("Unfold", () => doings.unfold(box)));
    actions.append(button("Only this", () => doings.narrow(box), { title: "Restrict graph, search, findings and tables to it (o)" }));
    parts.push(actions, ...doings.more(box));
  }
  parts.push(shareBar(byFormat(model, box.calls), (name, n) => `${name}: ${counted(n, "call")}`, 40),
    rows([["calls", String(found.calls)], ["bytes", found.bytes > 0 && inBytes(found.bytes)],
      ["casts", found.casts > 0 && `${found.casts}, ${inBytes(found.castBytes)}`]]));
  if (kinds.size > 0)
    parts.push(h("h4", {}, "Casts"), h("ul", { class: "casts" },
      ...[...kinds].sort((a, b) => b[1].bytes - a[1].bytes).map(([kind, sum]) => h("li", {}, `${sum.times} ${kind}, ${inBytes(sum.bytes)}`))));
  const bad = box.calls.map((index) => model.calls[index]!).filter((call) => call.finding);
  if (bad.length > 0)
    parts.push(h("h4", {}, counted(bad.length, "finding")), h("ul", { class: "casts" },
      ...bad.slice(0, 8).map((call) => h("li", {}, `${identity(call)}: ${call.finding}`))));
  return parts;
}
