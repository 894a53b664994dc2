// The graph: one opened module at a time, with the way back, a search, filters and keys.
import { Camera } from "./camera";
import { type By, scale } from "./colours";
import { type Call, type Model, isLeak } from "./data";
import { type Doings, detail } from "./detail";
import { button, h, on, say } from "./dom";
import { draw, labelled } from "./draw";
import { type Layout, place } from "./layout";
import { type Box, MOST, Tree, parentOf } from "./tree";
import { counted, identity, shortOp } from "./words";

const floats = (call: Call): boolean => Boolean(call.came || call.computes || call.result || call.finding);

const FILTERS: [string, string, (model: Model, call: Call) => boolean][] = [
  ["forward", "Forward calls with floating tensors", (_, call) => call.direction === "forward" && floats(call)],
  ["floats", "Calls with floating tensors", (_, call) => floats(call)],
  ["all", "All calls", () => true],
  ["casts", "Only with casts", (model, call) => model.castsInto[call.index]!.length > 0],
  ["leaks", "Only fp32 that no rule asked for", (_, call) => isLeak(call)],
  ["findings", "Only findings", (_, call) => call.finding !== ""],
  ["low", "Only in a low format", (_, call) => /bf16|fp16|e4m3|e5m2/.test(call.computes)],
  ["backward", "Only backward", (_, call) => call.direction !== "forward"],
];
const FOUND = 12;

export class GraphView {
  readonly element: HTMLElement;
  private readonly tree: Tree;
  private path = "";
  private selected = "";
  private filter: string;
  private from = 0;
  private by: By = "format";
  private readonly unfolded = new Set<string>();
  private layout: Layout = { boxes: [], paths: [], width: 0, height: 0 };
  private camera: Camera | null = null;
  private readonly crumbs = h("nav", { class: "crumbs", "aria-label": "Opened module" });
  private readonly stage = h("div", { class: "stage", tabindex: 0, "aria-label": "Graph: arrow keys move, Enter opens, Backspace goes up" });
  private readonly side = h("div", { class: "side" });
  private readonly found = h("ul", { class: "found" });
  private readonly search = h("input", { type: "search", id: "search", placeholder: "Search modules and ops ( / )", "aria-label": "Search modules and ops" });
  private readonly findings: Call[];

  constructor(private readonly model: Model, private readonly doings: Pick<Doings, "histogram" | "has">) {
    this.tree = new Tree(model);
    this.findings = model.findings();
    const forward = model.calls.filter((call) => call.direction === "forward");
    const both = forward.length > 0 && forward.length < model.calls.length;
    this.filter = !forward.some(floats) ? "all" : both ? "forward" : "floats";
    on(this.search, { input: () => this.list(), keydown: (event) => this.searchKey(event) });
    on(this.stage, { click: (event) => this.click(event), dblclick: () => this.enter(), keydown: (event) => this.key(event) });
    this.element = h("section", { id: "graph", "aria-labelledby": "graph-title" },
      h("h2", { id: "graph-title" }, "Graph"), this.tools(), this.crumbs,
      h("div", { class: "split" }, this.stage, this.side),
      h("p", { class: "quiet keys" }, "Keys: arrows move, Enter opens, Backspace goes up, / searches, n and p go through findings, w a s d pan, + − 0 zoom."),
      model.page.graph.note && h("p", { class: "quiet" }, model.page.graph.note));
  }

  // The first module in which there is more than one thing to see.
  start(): void {
    let at = this.tree.root;
    for (let parts = this.tree.parts(at); at.calls.length === 0 && parts.length === 1; parts = this.tree.parts(at)) at = parts[0]!;
    this.open(at.path);
  }

  private tools(): HTMLElement {
    const by = h("select", { id: "by", "aria-label": "Colour by" }, ...["format", "error", "cost"].map((name) => h("option", { value: name }, `Colour by ${name}`)));
    on(by, { change: () => { this.by = by.value as By; this.show(); } });
    const filter = h("select", { id: "filter", "aria-label": "Show" }, ...FILTERS.map(([name, text]) => h("option", { value: name }, text)));
    filter.value = this.filter;
    on(filter, { change: () => { this.filter = filter.value; this.from = 0; this.show(); } });
    const none = this.findings.length === 0;
    return h("div", { class: "tools" },
      h("div", { class: "searching" }, this.search, this.found), by, filter,
      h("span", { class: "group" },
        button("‹ Finding", () => this.finding(-1), { id: "previous", disabled: none, title: "Previous finding (p)" }),
        button("Finding ›", () => this.finding(1), { id: "next", disabled: none, title: "Next finding (n)" })),
      h("span", { class: "group" },
        button("−", () => this.camera?.zoom(1 / 1.2), { "aria-label": "Zoom out" }),
        button("+", () => this.camera?.zoom(1.2), { "aria-label": "Zoom in" }),
        button("Fit", () => this.camera?.fit(), { id: "fit" }),
        button("Up", () => this.up(), { id: "up", title: "To the module around (Backspace)" })));
  }

  open(path: string, key = ""): void {
    let module = this.tree.find(path);
    if (!module) return say(`${path} made no call`);
    // What gives way to what it holds is shown where it stands.
    while (this.tree.givesWay(module)) module = this.tree.find(parentOf(module.path))!;
    this.path = module.path;
    this.from = 0;
    this.selected = key;
    this.show();
  }

  // Select a call where it stands, beside others if its module has no other; or in its own module, if that is folded.
  reveal(call: Call): void {
    if (!FILTERS.find(([name]) => name === this.filter)![2](this.model, call)) {
      this.filter = "all";
      (this.element.querySelector("#filter") as HTMLSelectElement).value = "all";
    }
    const key = `call ${call.index}`;
    this.open(parentOf(call.path), key);
    if (this.selected !== key) this.open(call.path, key);
    this.stage.scrollIntoView({ block: "nearest" });
    this.stage.focus({ preventScroll: true });
  }

  private show(): void {
    const keep = FILTERS.find(([name]) => name === this.filter)![2];
    const view = this.tree.view(this.tree.find(this.path)!, this.unfolded, (call) => keep(this.model, call), this.from);
    this.layout = place(this.model, view, labelled);
    if (!this.layout.boxes.some((placed) => placed.box.key === this.selected)) this.selected = "";
    const svg = draw(this.model, this.layout, scale(this.model, this.by), this.selected);
    this.stage.replaceChildren(svg);
    if (view.boxes.length === 0) {
      this.stage.replaceChildren(h("p", { class: "empty" }, "No call here is of this kind."));
      this.camera = null;
    } else {
      this.camera = new Camera(svg, this.layout.width, this.layout.height);
      this.camera.fit();
    }
    if (view.left > 0 || this.from > 0) this.stage.append(this.pages(view.left));
    this.trail();
    this.say();
  }

  private pages(left: number): HTMLElement {
    const go = (by: number) => () => { this.from = Math.max(0, this.from + by); this.show(); };
    return h("div", { class: "pages" },
      button("Earlier", go(-MOST), { disabled: this.from === 0 }), `from ${this.from + 1}; ${left} more`,
      button("Later", go(MOST), { disabled: left === 0 }));
  }

  private trail(): void {
    const parts = this.path ? this.path.split(".") : [];
    const last = (text: string) => h("span", { "aria-current": "location" }, text);
    const crumb = (text: string, path: string, end: boolean) => (end ? last(text) : button(text, () => this.open(path), { class: "link" }));
    this.crumbs.replaceChildren(crumb(this.model.page.title, "", parts.length === 0),
      ...parts.flatMap((name, i) => [" › ", crumb(name, parts.slice(0, i + 1).join("."), i + 1 === parts.length)]));
  }

  private box(): Box | null {
    return this.layout.boxes.find((placed) => placed.box.key === this.selected)?.box ?? null;
  }

  private say(): void {
    const module = this.tree.find(this.path)!;
    const opened: Box = {
      key: "", kind: "module", title: module.path === "" ? this.model.page.title : module.name, path: module.path,
      calls: module.all, members: [module],
    };
    this.side.replaceChildren(detail(this.model, this.box(), opened, {
      ...this.doings,
      open: (box) => this.open(box.path),
      unfold: (box) => { this.unfolded.add(box.key); this.selected = ""; this.show(); },
    }));
  }

  private select(key: string): void {
    this.selected = key;
    for (const group of this.stage.querySelectorAll(".box")) group.classList.toggle("selected", group.getAttribute("data-key") === key);
    const placed = this.layout.boxes.find((p) => p.box.key === key);
    if (placed) this.camera?.show(placed.x, placed.y, placed.width, placed.height);
    this.say();
  }

  private click(event: MouseEvent): void {
    const key = (event.target as Element).closest(".box")?.getAttribute("data-key");
    if (key) this.select(key);
  }

  private enter(): void {
    const box = this.box();
    if (box?.kind === "module" || box?.kind === "fold") this.open(box.path);
    else if (box?.kind === "outside") this.up();
  }

  private up(): void {
    if (this.path === "") return;
    const left = this.path;
    this.open(parentOf(left), `module ${left}`);
  }

  private finding(step: number): void {
    if (this.findings.length === 0) return;
    const at = this.findings.findIndex((call) => this.selected === `call ${call.index}`);
    const next = at < 0 ? (step > 0 ? 0 : this.findings.length - 1) : (at + step + this.findings.length) % this.findings.length;
    this.reveal(this.findings[next]!);
    say(`Finding ${next + 1} of ${this.findings.length}`);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const pan = 60;
    const keys: Record<string, () => void> = {
      ArrowDown: () => this.go(0, 1), ArrowUp: () => this.go(0, -1), ArrowLeft: () => this.go(-1, 0), ArrowRight: () => this.go(1, 0),
      Enter: () => this.enter(), Backspace: () => this.up(), n: () => this.finding(1), p: () => this.finding(-1),
      w: () => this.camera?.move(0, -pan), s: () => this.camera?.move(0, pan), a: () => this.camera?.move(-pan, 0), d: () => this.camera?.move(pan, 0),
      "+": () => this.camera?.zoom(1.2), "-": () => this.camera?.zoom(1 / 1.2), "0": () => this.camera?.fit(),
    };
    const act = keys[event.key];
    if (!act || (event.target as Element).closest("button")) return;
    event.preventDefault();
    act();
  }

  // To the nearest box that way: what lies aside counts double.
  private go(dx: number, dy: number): void {
    const here = this.layout.boxes.find((placed) => placed.box.key === this.selected);
    const boxes = this.layout.boxes.filter((placed) => placed !== here);
    if (!here) {
      const first = boxes.filter((p) => p.box.calls.length > 0).sort((a, b) => a.y - b.y || a.x - b.x)[0] ?? boxes[0];
      if (first) this.select(first.box.key);
      return;
    }
    const far = (p: { x: number; y: number }) => {
      const along = (p.x - here.x) * dx + (p.y - here.y) * dy;
      return along < 4 ? Infinity : along + 2 * Math.abs((p.x - here.x) * dy + (p.y - here.y) * dx);
    };
    const near = boxes.map((p) => [far(p), p] as const).filter(([d]) => d < Infinity).sort((a, b) => a[0] - b[0])[0];
    if (near) this.select(near[1].box.key);
  }

  focusSearch(): void {
    this.search.focus();
    this.search.scrollIntoView({ block: "center" });
  }

  private matches(): Call[] {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length === 0) return [];
    return this.model.calls.filter((call) => {
      const text = `${identity(call)} ${call.file}:${call.line}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  private list(): void {
    const found = this.matches();
    const rows = found.slice(0, FOUND).map((call) =>
      h("li", {}, button(`${call.path || "(root)"} · ${shortOp(call.op)} ${call.label}`, () => this.pick(call))));
    if (found.length > FOUND) rows.push(h("li", {}, `and ${counted(found.length - FOUND, "call")} more`));
    if (found.length === 0 && this.search.value.trim()) rows.push(h("li", {}, "No call is named so."));
    this.found.replaceChildren(...rows);
  }

  private pick(call: Call): void {
    this.found.replaceChildren();
    this.reveal(call);
  }

  private searchKey(event: KeyboardEvent): void {
    if (event.key === "Enter") {
      const first = this.matches()[0];
      if (first) this.pick(first);
    } else if (event.key === "Escape") {
      this.search.value = "";
      this.found.replaceChildren();
      this.stage.focus();
    }
  }
}
