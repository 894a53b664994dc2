// Which calls of one run are those of the other: as they were found, and as somebody pairs them by hand.
import { type Model, type PairData, type Side, unpack } from "./data";
import type { Mark } from "./draw";
import { type Box, parentOf } from "./tree";
import { counted, errorText, identity, verdictClass } from "./words";

export interface Pair {
  a: number[]; b: number[]; verdict: string; difference: number | null; inputs: number | null; round_off_bound: number | null;
  measured_by: string; aligned_by: string; format_a: string; format_b: string; given: string; why: string;
}
// A line of the mapping: names of calls, or of modules; one side may be empty. calls: their numbers.
export interface Line { names: [string[], string[]]; calls: [number[], number[]]; modules: boolean }

export const BY_HAND = "paired by hand";
export const other = (side: Side): Side => (side === 0 ? 1 : 0);
export const letter = (side: Side): string => (side === 0 ? "a" : "b");
const ROOT = "(root)";
const WORST = ["differs", BY_HAND, "alone", "propagated", "round-off", "equal", "not compared"];

export const sides = (pair: Pair): [number[], number[]] => [pair.a, pair.b];

export class Partners {
  readonly lines: Line[] = [];
  readonly given: string[]; // lines of the mapping with which the runs were compared
  private readonly head: string[];
  private readonly found: Pair[];
  private at: [Map<number, Pair>, Map<number, Pair>] = [new Map(), new Map()];
  private paired: [Map<string, number>, Map<string, number>] = [new Map(), new Map()]; // calls with a partner, in each module
  private modules: [Map<string, string | null>, Map<string, string | null>] = [new Map(), new Map()];
  private readonly listeners: (() => void)[] = [];

  constructor(readonly models: [Model, Model], data: PairData) {
    this.found = unpack(data.columns, data.rows, data.text_columns, models[0].page.texts) as unknown as Pair[];
    const lines = data.mapping.split("\n").filter(Boolean);
    this.head = lines.filter((line) => line.startsWith("#"));
    this.given = lines.filter((line) => !line.startsWith("#"));
    this.apply();
  }

  changed(listener: () => void): void {
    this.listeners.push(listener);
  }

  of(side: Side, call: number): Pair | null {
    return this.at[side].get(call) ?? null;
  }

  // The calls of the other side that these are.
  across(side: Side, calls: number[]): number[] {
    return [...new Set(calls.flatMap((call) => { const pair = this.of(side, call); return pair ? sides(pair)[other(side)] : []; }))];
  }

  verdict(side: Side, call: number): string {
    return this.of(side, call)?.verdict ?? "alone";
  }

  // The module of the other side that has most of a module's partners, and least besides; null if none has any.
  module(side: Side, path: string): string | null {
    const known = this.modules[side].get(path);
    if (known !== undefined) return known;
    if (path === "") return "";
    const there = this.models[other(side)];
    const inside = (of: string) => (call: { path: string }) => call.path === of || call.path.startsWith(`${of}.`);
    const calls = this.models[side].calls.filter(inside(path)).map((call) => call.index);
    const counts = new Map<string, number>();
    for (const partner of this.across(side, calls))
      for (let at = there.calls[partner]!.path; ; at = parentOf(at)) {
        counts.set(at, (counts.get(at) ?? 0) + 1);
        if (at === "") break;
      }
    let best: string | null = null, most = 0;
    const name = path.slice(path.lastIndexOf(".") + 1);
    for (const [to, count] of counts) {
      const likeName = to === path ? 2e-3 : to.slice(to.lastIndexOf(".") + 1) === name ? 1e-3 : 0;
      const likeDepth = -1e-4 * Math.abs(to.split(".").length - path.split(".").length);
      const points = (2 * count) / ((this.paired[side].get(path) ?? 0) + this.paired[other(side)].get(to)!) + likeName + likeDepth;
      if (points > most) { best = to; most = points; }
    }
    this.modules[side].set(path, best);
    return best;
  }

  // What is said on a box: the worst verdict in it, and how many have it.
  mark(side: Side, box: Box): Mark | null {
    if (box.calls.length === 0) return null;
    const verdicts = box.calls.map((call) => this.verdict(side, call));
    const worst = WORST.find((verdict) => verdicts.includes(verdict)) ?? "not compared";
    const count = (verdict: string) => verdicts.filter((v) => v === verdict).length;
    const known = box.calls.map((call) => this.of(side, call)?.difference ?? null).filter((d): d is number => d !== null);
    const far = known.length > 0 ? errorText(Math.max(...known)) : "";
    const alone = `only in ${letter(side)}`;
    if (box.kind === "call" && box.calls.length === 1) {
      const text = worst === "alone" ? alone : worst === "equal" || !far ? worst : `${worst} ${far}`;
      return { kind: verdictClass(worst), text, also: this.otherFormat(side, box.calls[0]!) };
    }
    const said = [
      count("differs") > 0 && `${counted(count("differs"), "call")} ${count("differs") === 1 ? "differs" : "differ"}`,
      count("alone") > 0 && `${count("alone")} ${alone}`, count(BY_HAND) > 0 && `${count(BY_HAND)} by hand`,
    ].filter(Boolean);
    const text = said.length > 0 ? said.join(", ") : worst === "equal" || !far ? worst : `${worst}, up to ${far}`;
    return { kind: verdictClass(worst), text, also: "" };
  }

  // Calls with other words are not folded into one: a difference, a missing partner, another format.
  word(side: Side, call: number): string {
    const verdict = this.verdict(side, call);
    return `${["differs", "alone", BY_HAND].includes(verdict) ? verdict : ""} ${this.otherFormat(side, call)}`;
  }

  otherFormat(side: Side, call: number): string {
    const pair = this.of(side, call);
    return pair && pair.format_a !== pair.format_b ? `${letter(other(side))}: ${[pair.format_a, pair.format_b][other(side)] || "none"}` : "";
  }

  // -- by hand --------------------------------------------------------------------------------------------------------

  // Lines for two boxes; what is wrong with them as text. add: to the pair that one of them is in already.
  pair(boxes: [Box, Box], add = false): string {
    const kinds = boxes.map((box) => (box.kind === "call" ? "call" : box.kind === "fold" ? "fold" : box.kind === "module" ? "module" : ""));
    if (kinds[0] !== kinds[1] || !kinds[0]) return "A call is paired with a call, a module with a module, a fold with a fold";
    const lines = kinds[0] === "call" ? this.callLines(boxes, add) : this.moduleLines(boxes);
    if (typeof lines === "string") return lines;
    return this.add(lines);
  }

  // A line for each box that leaves it without a partner.
  unpair(boxes: (Box | null)[]): string {
    const lines: Line[] = [];
    boxes.forEach((box, side) => {
      if (!box || box.calls.length === 0) return;
      const pair = box.kind === "call" ? this.of(side as Side, box.calls[0]!) : null;
      const calls = (of: Side): number[] => (pair ? sides(pair)[of] : of === side ? box.calls : []);
      if (box.kind === "call")
        for (const of of [0, 1] as Side[]) if (calls(of).length > 0) lines.push(this.line(of, this.names(of, calls(of)), calls(of), false));
      if (box.kind !== "call")
        for (const path of this.pathsOf(side as Side, box)) lines.push(this.line(side as Side, [path], this.directly(side as Side, path), true));
    });
    return lines.length > 0 ? this.add(lines) : "Nothing is selected that could be left without a partner";
  }

  remove(lines: Line[]): void {
    for (const line of lines) this.lines.splice(this.lines.indexOf(line), 1);
    this.apply();
  }

  removeGiven(line: string): void {
    this.given.splice(this.given.indexOf(line), 1);
    this.apply();
  }

  // The file that `--mapping` reads: these lines first, since calls and modules belong to the first line with them.
  text(): string {
    const made = new Set(this.lines.filter((line) => !line.modules).flatMap((line) => line.names.flat()));
    const isTaken = (line: string) => line.includes(" #") && line.split(" = ").some((half) => half.split(" + ").some((name) => made.has(name.trim())));
    return [...this.head, ...this.lines.map(lineText), ...this.given.filter((line) => !isTaken(line)), ""].join("\n");
  }

  private names(side: Side, calls: number[]): string[] {
    return calls.map((call) => identity(this.models[side].calls[call]!));
  }

  private line(side: Side, names: string[], calls: number[], modules: boolean): Line {
    return side === 0 ? { names: [names, []], calls: [calls, []], modules } : { names: [[], names], calls: [[], calls], modules };
  }

  private callLines(boxes: [Box, Box], add: boolean): Line[] | string {
    const calls: [number[], number[]] = [[...boxes[0].calls], [...boxes[1].calls]];
    if (add) {
      const known = boxes.map((box, side) => this.lines.find((line) => !line.modules && line.calls.every((c) => c.length > 0) && line.calls[side as Side].includes(box.calls[0]!)));
      const line = known[0] ?? known[1];
      if (!line) return "Neither is in a pair that was made by hand";
      for (const side of [0, 1] as Side[]) calls[side] = [...new Set([...line.calls[side], ...calls[side]])];
      if (calls[0].length > 1 && calls[1].length > 1) return "One call is paired with several, not several with several";
    }
    return [{ names: [this.names(0, calls[0]), this.names(1, calls[1])], calls, modules: false }];
  }

  // Modules are named where they make calls of their own: what is in them is paired by its names.
  private moduleLines(boxes: [Box, Box]): Line[] | string {
    const [a, b] = boxes;
    if (a.members.length !== b.members.length) return `${counted(a.members.length, "module")} and ${b.members.length} are no pairs`;
    const there = new Set(this.models[1].calls.map((call) => call.path));
    const lines = a.members.flatMap((member, i) => this.paths(0, member.path).map((path): Line | null => {
      const to = `${b.members[i]!.path}${path.slice(member.path.length)}`;
      return there.has(to) ? { names: [[path], [to]], calls: [this.directly(0, path), this.directly(1, to)], modules: true } : null;
    }));
    const made = lines.filter((line): line is Line => line !== null);
    return made.length > 0 ? made : "No parts of the two have the same names: pair what is in them";
  }

  private pathsOf(side: Side, box: Box): string[] {
    return box.members.flatMap((member) => this.paths(side, member.path));
  }

  private paths(side: Side, of: string): string[] {
    return [...new Set(this.models[side].calls.map((call) => call.path))].filter((path) => of === "" || path === of || path.startsWith(`${of}.`));
  }

  private directly(side: Side, path: string): number[] {
    return this.models[side].calls.filter((call) => call.path === path).map((call) => call.index);
  }

  private add(lines: Line[]): string {
    const bad = lines.flatMap((line) => line.names.flat()).find((name) => / [=+] |[\n\r*]/.test(name) || name.trim() !== name);
    if (bad !== undefined) return `A mapping cannot name ${bad}`;
    for (const line of lines) {
      const clash = this.lines.filter((old) => old.modules === line.modules && ([0, 1] as Side[]).some((side) => old.names[side].some((name) => line.names[side].includes(name))));
      for (const old of clash) this.lines.splice(this.lines.indexOf(old), 1);
      this.lines.push(line);
    }
    this.apply();
    return "";
  }

  // What was found, then each line by hand: a pair that loses a call is looked for again by the next comparison.
  private apply(): void {
    this.at = [new Map(), new Map()];
    this.modules = [new Map(), new Map()];
    const put = (pair: Pair) => { for (const side of [0, 1] as Side[]) for (const call of sides(pair)[side]) this.at[side].set(call, pair); };
    const drop = (side: Side, call: number) => {
      const pair = this.of(side, call);
      if (pair) for (const of of [0, 1] as Side[]) for (const one of sides(pair)[of]) this.at[of].delete(one);
    };
    this.found.forEach(put);
    for (const line of [...this.lines].sort((x, y) => Number(y.modules) - Number(x.modules))) {
      const pairs = line.calls[0].length > 0 && line.calls[1].length > 0;
      if (!line.modules || !pairs) for (const side of [0, 1] as Side[]) for (const call of line.calls[side]) drop(side, call);
      if (!line.modules && pairs) put({
        a: line.calls[0], b: line.calls[1], verdict: BY_HAND, difference: null, inputs: null, round_off_bound: null, measured_by: "", aligned_by: "hand",
        format_a: this.models[0].calls[line.calls[0][0]!]!.computes, format_b: this.models[1].calls[line.calls[1][0]!]!.computes, given: "",
        why: "its figures come with the next narrowcast diff",
      });
      if (line.modules && pairs) {
        this.modules[0].set(line.names[0][0]!, line.names[1][0]!);
        this.modules[1].set(line.names[1][0]!, line.names[0][0]!);
      }
    }
    this.paired = ([0, 1] as Side[]).map((side) => this.counted(side)) as [Map<string, number>, Map<string, number>];
    for (const listener of this.listeners) listener();
  }

  // Calls without a partner say nothing for or against a module.
  private counted(side: Side): Map<string, number> {
    const counts = new Map<string, number>();
    for (const index of this.at[side].keys())
      for (let at = this.models[side].calls[index]!.path; ; at = parentOf(at)) {
        counts.set(at, (counts.get(at) ?? 0) + 1);
        if (at === "") break;
      }
    return counts;
  }
}

export function lineText(line: Line): string {
  const [a, b] = line.names.map((names) => names.map((name) => name || ROOT).join(" + ") || "-");
  return `${a} = ${b}`;
}
