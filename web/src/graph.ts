// One graph: one opened module with those that are open in it, the way back, a search, findings and keys.
import { Camera } from "./camera";
import { scale } from "./colours";
import type { Controls } from "./controls";
import type { Call, Model, Side } from "./data";
import { type Doings, detail } from "./detail";
import { button, h, on, say } from "./dom";
import { MARKED, type Marks, draw, labelled } from "./draw";
import { type Layout, type Placed, place } from "./layout";
import { Minimap } from "./minimap";
import type { Scope } from "./scope";
import { Search } from "./search";
import { type Box, MOST, type Shown, Tree, parentOf } from "./tree";

// What a graph on a page has of its own: one of two has marks, and tells when it is moved.
export interface Setting extends Pick<Doings, "histogram" | "has" | "more"> {
  side: Side;
  suffix: string; // of ids
  label: string;
  controls: Controls;
  scope: Scope;
  narrow: (box: Box) => void;
  marks: Marks | null;
  word: (index: number) => string;
  moved: (opened: boolean) => void;
  keys: Record<string, () => void>;
}

const FEW = 6, UNFOLDED = 8;

export class GraphView {
  readonly search: Search;
  readonly tools: HTMLElement;
  readonly crumbs: HTMLElement;
  readonly stage: HTMLElement;
  readonly side = h("div", { class: "side" });
  path = "";
  private readonly tree: Tree;
  private selected = "";
  private from = 0;
  private readonly shown: Shown = { unfolded: new Set(), inPlace: new Set() };
  private layout: Layout = { boxes: [], groups: [], paths: [], width: 0, height: 0 };
  private camera: Camera | null = null;
  private steps: HTMLButtonElement[] = [];

  constructor(readonly model: Model, private readonly setting: Setting) {
    const { suffix, controls, scope } = setting;
    this.tree = new Tree(model, setting.word);
    this.search = new Search(
      `search${suffix}`, `Search modules and ops${setting.label}`, model, (call) => scope.holds(call.path, setting.side),
      (call) => this.reveal(call), () => this.stage.focus());
    this.crumbs = h("nav", { class: "crumbs", "aria-label": `Opened module${setting.label}` });
    this.stage = h("div", { class: "stage", tabindex: 0, "aria-label": `Graph${setting.label}: arrow keys move, Enter opens, Backspace goes up` });
    on(this.stage, { click: (event) => this.click(event), dblclick: (event) => this.doubleClick(event), keydown: (event) => this.key(event) });
    this.tools = this.makeTools(suffix);
    const again = () => { this.from = 0; this.show(); };
    controls.changed(again);
    scope.changed(again);
  }

  // The first module in which there is more than one thing to see; a few layers, where they are nearly all there is.
  start(): void {
    let at = this.tree.root;
    for (let parts = this.tree.parts(at); at.calls.length === 0 && parts.length === 1; parts = this.tree.parts(at)) at = parts[0]!;
    const { boxes } = this.tree.view(at, this.shown, () => true, 0);
    const folds = boxes.filter((box) => box.kind === "fold" && box.members.length <= UNFOLDED);
    if (boxes.length < FEW && !this.setting.marks) for (const fold of folds) this.shown.unfolded.add(fold.key);
    this.open(at.path);
  }

  private makeTools(suffix: string): HTMLElement {
    this.steps = [
      button("‹ Finding", () => this.finding(-1), { id: `previous${suffix}`, title: "Previous finding (p)" }),
      button("Finding ›", () => this.finding(1), { id: `next${suffix}`, title: "Next finding (n)" }),
    ];
    return h("div", { class: "tools" }, this.search.element,
      h("span", { class: "group" }, ...this.steps),
      h("span", { class: "group" },
        button("−", () => this.camera?.zoom(1 / 1.2), { "aria-label": "Zoom out" }),
        button("+", () => this.camera?.zoom(1.2), { "aria-label": "Zoom in" }),
        button("Fit", () => this.camera?.fit(), { id: `fit${suffix}` }),
        button("Up", () => this.up(), { id: `up${suffix}`, title: "To the module around (Backspace)" })));
  }

  private resolved(path: string): string | null {
    let module = this.tree.find(path);
    if (!module) return null;
    // What gives way to what it holds is shown where it stands.
    while (this.tree.givesWay(module)) module = this.tree.find(parentOf(module.path))!;
    return module.path;
  }

  open(path: string, key = "", quiet = false): void {
    const at = this.resolved(path);
    if (at === null) return say(`${path} made no call`);
    this.path = at;
    this.from = 0;
    this.selected = key;
    this.show();
    if (!quiet) this.setting.moved(true);
  }

  // Select a call where it stands, beside others if its module has no other; or in its own module, if that is folded.
  reveal(call: Call): void {
    if (!this.setting.scope.holds(call.path, this.setting.side)) this.setting.scope.clear();
    this.setting.controls.letSee(this.model, call);
    const key = `call ${call.index}`;
    if (this.placed(key)?.box.around === undefined) this.open(parentOf(call.path), key, true);
    else this.select(key, true);
    if (this.selected !== key) this.open(call.path, key, true);
    this.setting.moved(true);
    this.stage.scrollIntoView({ block: "nearest" });
    this.stage.focus({ preventScroll: true });
  }

  // What the other graph shows, here: its module, if it has a partner, and the box with most of these calls.
  follow(path: string | null, calls: number[], keep: boolean): void {
    if (path !== null && this.resolved(path) !== this.path) this.open(path, "", true);
    if (calls.length === 0) {
      if (!keep) this.select("", true);
      return;
    }
    const wanted = new Set(calls);
    const best = () => {
      const points = (box: Box) => (2 * box.calls.filter((call) => wanted.has(call)).length) / (box.calls.length + wanted.size);
      return this.layout.boxes.map(({ box }) => [points(box), box.key] as const).filter(([n]) => n > 0).sort((x, y) => y[0] - x[0])[0]?.[1];
    };
    const first = this.model.calls[calls[0]!]!;
    this.setting.controls.letSee(this.model, first);
    if (best() === undefined) this.open(parentOf(first.path), "", true);
    if (best() === undefined) this.open(first.path, "", true);
    this.select(best() ?? "", true);
  }

  // Partners have changed.
  again(): void {
    this.tree.forget();
    this.show();
  }

  private keeps(call: Call): boolean {
    return this.setting.scope.holds(call.path, this.setting.side) && this.setting.controls.keeps(this.model, call);
  }

  private findings(): Call[] {
    return this.model.findings().filter((call) => this.setting.scope.holds(call.path, this.setting.side));
  }

  private show(): void {
    const { marks, controls } = this.setting;
    const view = this.tree.view(this.tree.find(this.path)!, this.shown, (call) => this.keeps(call), this.from);
    this.layout = place(this.model, view, labelled, marks ? MARKED : 0);
    if (!this.box()) this.selected = "";
    const svg = draw(this.model, this.layout, scale(this.model, controls.by, marks), this.selected, marks);
    if (view.boxes.length === 0) {
      this.stage.replaceChildren(h("p", { class: "empty" }, "No call here is of this kind."));
      this.camera = null;
    } else {
      const map = new Minimap(this.layout);
      this.stage.replaceChildren(svg, map.element);
      const camera = new Camera(svg, this.layout.width, this.layout.height, () => map.update(camera));
      map.follow(camera);
      camera.fit();
      this.camera = camera;
      this.lookAt(this.selected);
    }
    if (view.left > 0 || this.from > 0) this.stage.append(this.pages(view.left));
    const none = this.findings().length === 0;
    for (const step of this.steps) step.disabled = none;
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
    this.crumbs.replaceChildren(crumb(this.model.name, "", parts.length === 0),
      ...parts.flatMap((name, i) => [" › ", crumb(name, parts.slice(0, i + 1).join("."), i + 1 === parts.length)]));
  }

  private placed(key: string): Placed | undefined {
    return [...this.layout.boxes, ...this.layout.groups].find((placed) => placed.box.key === key);
  }

  box(): Box | null {
    return this.placed(this.selected)?.box ?? null;
  }

  // The opened module as a box.
  opened(): Box {
    const module = this.tree.find(this.path)!;
    const title = module.path === "" ? this.model.name : module.name;
    return { key: "", kind: "module", title, path: module.path, calls: module.all, members: [module] };
  }

  private say(): void {
    const opened = this.opened();
    this.side.replaceChildren(detail(this.model, this.box(), opened, {
      ...this.setting,
      open: (box) => this.open(box.path),
      unfold: (box) => { this.shown.unfolded.add(box.key); this.selected = ""; this.show(); },
      inPlace: (box) => this.inPlace(box), isOpen: (box) => this.shown.inPlace.has(box.path),
    }));
  }

  private select(key: string, quiet = false): void {
    this.selected = key;
    for (const group of this.stage.querySelectorAll(".box")) group.classList.toggle("selected", group.getAttribute("data-key") === key);
    this.lookAt(key);
    this.say();
    if (!quiet) this.setting.moved(false);
  }

  private lookAt(key: string): void {
    const placed = this.placed(key);
    if (placed) this.camera?.show(placed.x, placed.y, placed.width, placed.height);
  }

  private click(event: MouseEvent): void {
    const key = (event.target as Element).closest(".box")?.getAttribute("data-key");
    if (key) this.select(key);
  }

  private doubleClick(event: MouseEvent): void {
    if ((event.target as Element).closest(".box")) this.enter();
  }

  private enter(): void {
    const box = this.box();
    if (box?.kind === "module" || box?.kind === "fold") this.open(box.path);
    else if (box?.kind === "outside") this.up();
  }

  // Open a module where it stands, or close it again; of a call, or without one, close the module around.
  private inPlace(box: Box | null): void {
    const group = box?.kind === "module" ? box : this.placed(box?.around ?? "")?.box;
    if (!group) return say("Select a module to open it in its place");
    if (!this.shown.inPlace.delete(group.path)) this.shown.inPlace.add(group.path);
    this.selected = group.key;
    this.show();
  }

  private up(): void {
    if (this.path === "") return;
    const left = this.path;
    this.open(parentOf(left), `module ${left}`);
  }

  private finding(step: number): void {
    const all = this.findings();
    if (all.length === 0) return;
    const at = all.findIndex((call) => this.selected === `call ${call.index}`);
    const next = at < 0 ? (step > 0 ? 0 : all.length - 1) : (at + step + all.length) % all.length;
    this.reveal(all[next]!);
    say(`Finding ${next + 1} of ${all.length}`);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const pan = 60;
    const keys: Record<string, () => void> = {
      ArrowDown: () => this.go(0, 1), ArrowUp: () => this.go(0, -1), ArrowLeft: () => this.go(-1, 0), ArrowRight: () => this.go(1, 0),
      Enter: () => this.enter(), Backspace: () => this.up(), n: () => this.finding(1), p: () => this.finding(-1),
      w: () => this.camera?.move(0, -pan), s: () => this.camera?.move(0, pan), a: () => this.camera?.move(-pan, 0), d: () => this.camera?.move(pan, 0),
      "+": () => this.camera?.zoom(1.2), "-": () => this.camera?.zoom(1 / 1.2), "0": () => this.camera?.fit(),
      o: () => this.only(), i: () => this.inPlace(this.box()), ...this.setting.keys,
    };
    const act = keys[event.key];
    if (!act || (event.target as Element).closest("button")) return;
    event.preventDefault();
    act();
  }

  // Only the selected module, or the one around a call; or all again.
  private only(): void {
    if (this.setting.scope.active) this.setting.scope.clear();
    else this.setting.narrow(this.box() ?? this.opened());
  }

  // To the nearest box that way: what lies aside counts double.
  private go(dx: number, dy: number): void {
    const here = this.placed(this.selected);
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
}
