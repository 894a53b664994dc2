// The tree of modules, and what one opened module shows: its calls, the modules in it, some of them open in their
// places, alike ones folded.
import { type Call, type Edge, type Model, isCast } from "./data";

export interface Module { path: string; name: string; children: Module[]; calls: number[]; all: number[] }

export interface Box {
  key: string;
  kind: "call" | "module" | "fold" | "source" | "outside";
  title: string;
  path: string; // of what opens; of a call its own
  calls: number[];
  members: Module[];
  edge?: Edge;
  around?: string; // the key of the module, open in its place, that it stands in
}
export interface Link { from: string; to: string; bytes: number; edges: Edge[]; order: boolean }
export interface View { boxes: Box[]; groups: Box[]; links: Link[]; left: number } // groups: modules that are open in their places

// What a reader has opened besides: folds, by key, that show each of their modules; modules, by path, in their places.
export interface Shown { unfolded: Set<string>; inPlace: Set<string> }

const BEFORE = "before", AFTER = "after";
export const MOST = 160;

export class Tree {
  readonly root: Module = { path: "", name: "model", children: [], calls: [], all: [] };
  private readonly known = new Map<string, Module>([["", this.root]]);
  private readonly signatures = new Map<string, string>();

  // word: what must be alike, besides, in calls of modules that are folded.
  constructor(private readonly model: Model, private readonly word: (index: number) => string = () => "") {
    for (const call of model.calls) {
      let at = this.module(call.path);
      at.calls.push(call.index);
      for (;;) {
        at.all.push(call.index);
        if (at.path === "") break;
        at = this.known.get(parentOf(at.path))!;
      }
    }
  }

  private module(path: string): Module {
    const known = this.known.get(path);
    if (known) return known;
    const made: Module = { path, name: path.slice(path.lastIndexOf(".") + 1), children: [], calls: [], all: [] };
    this.known.set(path, made);
    this.module(parentOf(path)).children.push(made);
    return made;
  }

  // The words have changed.
  forget(): void {
    this.signatures.clear();
  }

  find(path: string): Module | undefined {
    return this.known.get(path);
  }

  // What stands in a module: its own modules; a list of layers, or what only holds one other, gives way to these.
  parts(of: Module): Module[] {
    return of.children.flatMap((child) => (this.givesWay(child) ? this.parts(child) : [child]));
  }

  givesWay(of: Module): boolean {
    if (of.calls.length > 0 || of.path === "") return false;
    return of.children.every((child) => isNumber(child.name)) || (of.children.length === 1 && !isNumber(of.name));
  }

  // Two modules with the same one do the same, in the same formats, with the same casts.
  private signature(of: Module): string {
    const known = this.signatures.get(of.path);
    if (known !== undefined) return known;
    const words = of.all.map((index) => {
      const call = this.model.calls[index]!;
      const casts = this.model.castsInto[index]!.map((cast) => `${cast.argument}${cast.src}${cast.dst}${cast.how}`);
      const inside = call.path.slice(of.path.length);
      return [inside, call.op, call.direction, call.computes, call.result, call.finding ? "!" : "", this.word(index), ...casts].join(" ");
    });
    const made = words.join("\n");
    this.signatures.set(of.path, made);
    return made;
  }

  view(of: Module, shown: Shown, keep: (call: Call) => boolean, from: number): View {
    const groups: Box[] = [];
    const boxes = this.boxes(of, shown, keep, groups, undefined).slice(from);
    const left = Math.max(0, boxes.length - MOST);
    boxes.splice(MOST);
    const around = new Map(groups.map((group) => [group.key, group]));
    const used = new Set<string>();
    for (const box of boxes)
      for (let key = box.around; key !== undefined; key = around.get(key)?.around) used.add(key);
    const links = this.links(of, boxes);
    return { boxes, groups: groups.filter((group) => used.has(group.key)), links, left };
  }

  private boxes(of: Module, shown: Shown, keep: (call: Call) => boolean, groups: Box[], around: string | undefined): Box[] {
    const kept = (calls: number[]) => calls.filter((index) => keep(this.model.calls[index]!));
    const boxes: Box[] = kept(of.calls).map((index) => {
      const call = this.model.calls[index]!;
      return { key: `call ${index}`, kind: "call", title: "", path: call.path, calls: [index], members: [], around };
    });
    const parts = this.parts(of).map((part) => ({ part, calls: kept(part.all) })).filter((p) => p.calls.length > 0);
    const order = (calls: number[]) => calls[0] ?? 0;
    parts.sort((a, b) => order(a.calls) - order(b.calls));
    for (let i = 0; i < parts.length; ) {
      let next = i + 1;
      while (next < parts.length && this.alike(parts[i]!.part, parts[next]!.part)) next++;
      const members = parts.slice(i, next);
      const first = members[0]!.part;
      const key = `fold ${first.path}`;
      if (members.length > 1 && !shown.unfolded.has(key)) {
        const pattern = `${relative(parentOf(first.path), of.path)}.*`.replace(/^\./, "");
        boxes.push({
          key, kind: "fold", title: `${pattern} × ${members.length}`, path: first.path,
          calls: members.flatMap((m) => m.calls), members: members.map((m) => m.part), around,
        });
      } else {
        for (const { part, calls } of members) {
          // A module of one call is that call: opening it would show nothing more.
          const alone = calls.length === 1;
          const key = alone ? `call ${calls[0]}` : `module ${part.path}`;
          const title = relative(part.path, of.path);
          const box: Box = { key, kind: alone ? "call" : "module", title, path: part.path, calls, members: [part], around };
          if (alone || !shown.inPlace.has(part.path)) boxes.push(box);
          else {
            groups.push(box);
            boxes.push(...this.boxes(part, shown, keep, groups, key));
          }
        }
      }
      i = next;
    }
    return boxes.sort((a, b) => order(a.calls) - order(b.calls));
  }

  private alike(a: Module, b: Module): boolean {
    if (!isNumber(a.name) || !isNumber(b.name) || parentOf(a.path) !== parentOf(b.path)) return false;
    return this.signature(a) === this.signature(b);
  }

  private links(of: Module, boxes: Box[]): Link[] {
    const at = new Map<number, Box>();
    for (const box of boxes) for (const index of box.calls) at.set(index, box);
    const inside = new Set(of.all);
    const links = new Map<string, Link>();
    const sources: Box[] = [];
    const join = (from: string, to: string, edge: Edge | null) => {
      const key = `${from}\n${to}`;
      const link = links.get(key) ?? { from, to, bytes: 0, edges: [], order: edge === null };
      links.set(key, link);
      if (edge) {
        link.edges.push(edge);
        link.bytes += edge.bytes;
      }
    };
    const ends = new Set<string>();
    for (const edge of this.model.edges) {
      const to = at.get(edge.end), from = at.get(edge.start);
      if (edge.start < 0) {
        // What comes from nowhere is drawn where it is cast, and only for single calls.
        if (to?.kind !== "call" || !isCast(edge)) continue;
        const source: Box = {
          key: `source ${sources.length}`, kind: "source", title: `${edge.argument} ${edge.src}`, path: of.path,
          calls: [], members: [], edge,
        };
        sources.push(source);
        join(source.key, to.key, edge);
      } else if (from && to) {
        if (from !== to) join(from.key, to.key, edge);
      } else if (to && !inside.has(edge.start)) {
        ends.add(BEFORE);
        join(BEFORE, to.key, edge);
      } else if (from && !inside.has(edge.end)) {
        ends.add(AFTER);
        join(from.key, AFTER, edge);
      }
    }
    if (!this.model.graph.flow)
      boxes.slice(1).forEach((box, i) => join(boxes[i]!.key, box.key, null));
    for (const key of ends)
      sources.push({ key, kind: "outside", title: key === BEFORE ? "from outside" : "to outside", path: of.path, calls: [], members: [] });
    boxes.push(...sources);
    return [...links.values()];
  }
}

const isNumber = (name: string): boolean => /^\d+$/.test(name);

export const parentOf = (path: string): string => path.slice(0, Math.max(0, path.lastIndexOf(".")));

const relative = (path: string, of: string): string => (of && path.startsWith(`${of}.`) ? path.slice(of.length + 1) : path === of ? "" : path);
