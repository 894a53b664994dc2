// Two runs side by side: what is opened and selected in one is so in the other; calls are paired by hand.
import type { Controls, Filter } from "./controls";
import type { Call, Model, Side } from "./data";
import { rows } from "./detail";
import { button, copy, h, on, save, say } from "./dom";
import { GraphView } from "./graph";
import { BY_HAND, type Line, type Partners, letter, lineText, other, sides } from "./partners";
import type { Scope } from "./scope";
import type { Box } from "./tree";
import { counted, errorText, identity, verdictClass } from "./words";

const SIDES: Side[] = [0, 1];
const FILE = "mapping.txt";

export function pairFilters(partners: Partners): Filter[] {
  const verdict = (model: Model, call: Call) => partners.verdict(partners.models[0] === model ? 0 : 1, call.index);
  const format = (model: Model, call: Call) => partners.otherFormat(partners.models[0] === model ? 0 : 1, call.index);
  return [
    ["differs", "Only what makes a difference", (model, call) => verdict(model, call) === "differs"],
    ["formats", "Only in other formats", (model, call) => format(model, call) !== ""],
    ["alone", "Only without a partner", (model, call) => verdict(model, call) === "alone"],
    ["hand", "Only paired by hand", (model, call) => verdict(model, call) === BY_HAND],
  ];
}

export class PairView {
  readonly element: HTMLElement;
  readonly views: [GraphView, GraphView];
  private together = true;
  private moving = false;
  private last: Side = 0;
  private readonly follows = h("input", { type: "checkbox", id: "together", checked: true });
  private readonly bar = h("div", { class: "pairing" });
  private readonly hand = h("div", { class: "hand" });

  constructor(private readonly partners: Partners, private readonly names: [string, string], private readonly controls: Controls,
    private readonly scope: Scope) {
    this.views = [this.view(0), this.view(1)];
    on(this.follows, { change: () => this.setTogether(this.follows.checked) });
    const notes = new Set(partners.models.map((model) => model.graph.note).filter(Boolean));
    this.element = h("section", { id: "graph", "aria-labelledby": "graph-title" },
      h("h2", { id: "graph-title" }, "Graph"),
      h("div", { class: "tools" }, ...controls.elements, h("label", { title: "Open and select in both (t)" }, this.follows, " Move together"), scope.chip()),
      h("div", { class: "both" },
        ...this.views.map((view, side) => h("div", { class: "head" }, h("h3", {}, `${letter(side as Side)}: ${names[side]}`), view.tools, view.crumbs)),
        ...this.views.map((view) => view.stage), ...this.views.map((view) => view.side)),
      this.bar, this.hand,
      h("p", { class: "quiet keys" }, "Keys, in the graph that has the focus (Tab goes to the other): arrows move, Enter opens, Backspace goes up, "
        + "/ searches, n and p go through findings, i opens a module in its place or closes it, o shows only this module, m pairs what is selected, u leaves it without a partner, t moves both or one, w a s d pan, + − 0 zoom."),
      ...[...notes].map((note) => h("p", { class: "quiet" }, note)));
    this.views.forEach((view, side) => {
      for (const part of [view.tools, view.crumbs, view.stage, view.side]) on(part, { focusin: () => { this.last = side as Side; } });
    });
    partners.changed(() => { for (const view of this.views) view.again(); this.say(); });
    this.say();
  }

  start(): void {
    this.moving = true; // each by itself; then the second where the first is
    for (const view of [this.views[1], this.views[0]]) view.start();
    this.moving = false;
    this.follow(0, true);
  }

  // Of the graph that had the focus last.
  focusSearch(): void {
    this.views[this.last].search.focus();
  }

  private view(side: Side): GraphView {
    const { partners, controls, scope } = this;
    return new GraphView(partners.models[side], {
      side, suffix: `-${letter(side)}`, label: ` of ${letter(side)}, ${this.names[side]}`, controls, scope,
      narrow: (box) => this.narrow(side, box),
      marks: { of: (box) => partners.mark(side, box) },
      word: (index) => partners.word(side, index),
      moved: (opened) => this.follow(side, opened),
      keys: { m: () => this.pair(false), u: () => this.unpair(), t: () => this.setTogether(!this.together) },
      histogram: () => {}, has: () => false,
      more: (box) => this.more(side, box),
    });
  }

  private setTogether(value: boolean): void {
    this.together = this.follows.checked = value;
    say(value ? "Both graphs move together" : "Each graph moves alone");
  }

  private follow(side: Side, opened: boolean): void {
    if (this.moving || !this.views) return;
    const view = this.views[side], there = this.views[other(side)];
    if (this.together) {
      const box = view.box();
      const calls = box ? this.partners.across(side, box.calls) : [];
      this.moving = true;
      // A call without a partner leaves the other selection alone, so that the two can be paired.
      there.follow(opened ? this.partners.module(side, view.path) : null, calls, box !== null && calls.length === 0);
      this.moving = false;
      if (opened && view.path && this.partners.module(side, view.path) === null) say(`${view.path} has no partner in ${letter(other(side))}`);
    }
    this.say();
  }

  private narrow(side: Side, box: Box): void {
    const here = box.kind === "call" ? [box.path] : box.members.map((member) => member.path);
    if (here.length === 0) return;
    const there = here.map((path) => this.partners.module(side, path)).filter((path): path is string => path !== null);
    this.scope.set(`${letter(side)}: ${nameOf(this.partners.models[side], { ...box, kind: "module", title: box.kind === "fold" ? box.title : "" })}`,
      side === 0 ? [here, there] : [there, here]);
  }

  // What is known of a box's partner, below its name.
  private more(side: Side, box: Box): Node[] {
    const there = this.partners.models[other(side)], at = `in ${letter(other(side))}`;
    const mark = this.partners.mark(side, box);
    if (!mark) return [];
    if (box.kind !== "call") return [h("p", {}, h("b", { class: `chip ${mark.kind}` }, mark.text))];
    const pair = this.partners.of(side, box.calls[0]!);
    if (!pair) return [h("p", {}, h("b", { class: `chip ${mark.kind}` }, mark.text)), h("p", { class: "quiet" }, "It has no partner.")];
    const calls = sides(pair)[other(side)].map((index) => there.calls[index]!);
    const figure = (value: number | null) => (value === null ? "" : errorText(value));
    const links = calls.map((call) => button(identity(call), () => this.views[other(side)].reveal(call), { class: "link" }));
    return [h("p", {}, h("b", { class: `chip ${verdictClass(pair.verdict)}` }, mark.text)), rows([
      [at, h("span", {}, ...links)],
      [`${at} computes`, [pair.format_a, pair.format_b][other(side)]!],
      ["difference", figure(pair.difference)],
      ["round-off bound", figure(pair.round_off_bound)],
      ["inputs differ by", figure(pair.inputs)],
      ["measured by", pair.measured_by],
      ["paired by", pair.aligned_by],
      ["given, a / b", pair.given],
      ["because", pair.why],
    ])];
  }

  // -- pairs by hand --------------------------------------------------------------------------------------------------

  private boxes(): [Box | null, Box | null] {
    return [this.views[0].box(), this.views[1].box()];
  }

  private pair(add: boolean): void {
    const [a, b] = this.boxes();
    if (!a || !b) return say("Select a call, or a module, in each graph");
    say(this.partners.pair([a, b], add) || "Paired: figures come with the next narrowcast diff");
  }

  private unpair(): void {
    say(this.partners.unpair(this.boxes()) || "Left without a partner, from the next narrowcast diff on");
  }

  private say(): void {
    const boxes = this.boxes();
    const chosen = SIDES.map((side) => h("li", {}, `${letter(side)}: `,
      boxes[side] ? h("code", {}, nameOf(this.partners.models[side], boxes[side])) : h("span", { class: "quiet" }, "nothing is selected")));
    const both = boxes[0] !== null && boxes[1] !== null;
    const inHand = boxes.map((box, side) => box?.kind === "call" && this.partners.verdict(side as Side, box.calls[0]!) === BY_HAND);
    this.bar.replaceChildren(
      h("h3", {}, "Pair by hand"),
      h("p", { class: "quiet" }, "Select a call, or a module, in each graph. Figures of newly paired calls come with the next narrowcast diff."),
      h("ul", {}, ...chosen),
      h("p", { class: "actions" },
        button("Pair these", () => this.pair(false), { id: "pair", disabled: !both, title: "These two are the same (m)" }),
        button("Add to its pair", () => this.pair(true), { id: "add", disabled: !both || inHand[0] === inHand[1], title: "One call is several in the other run, as fused projections are" }),
        button("Unpair", () => this.unpair(), { id: "unpair", disabled: !boxes[0] && !boxes[1], title: "What is selected has no partner (u)" })));
    this.list();
  }

  private list(): void {
    const { lines, given } = this.partners;
    const row = (text: string, remove: () => void, what: string) =>
      h("li", {}, h("code", {}, text), h("span", { class: "quiet" }, what), button("Remove", remove, { "aria-label": `Remove ${text}` }));
    if (lines.length === 0 && given.length === 0) return this.hand.replaceChildren();
    const all: Line[] = [...lines];
    this.hand.replaceChildren(
      h("h3", {}, `Mapping: ${counted(lines.length + given.length, "line")}`),
      h("p", { class: "quiet" }, "The next comparison reads it: ", h("code", {}, `narrowcast diff RUN_A RUN_B --mapping ${FILE}`)),
      h("ul", { class: "lines" },
        ...all.map((line) => row(lineText(line), () => this.partners.remove([line]), line.modules ? " modules, new " : " calls, new ")),
        ...given.map((line) => row(line, () => this.partners.removeGiven(line), " as given "))),
      h("p", { class: "actions" },
        button("Save the mapping", () => save(this.partners.text(), FILE, "text/plain"), { id: "save-mapping", class: "primary" }),
        button("Copy", () => void copy(this.partners.text(), "the mapping")),
        button("Remove new lines", () => this.partners.remove(all), { disabled: lines.length === 0 })));
  }
}

function nameOf(model: Model, box: Box): string {
  if (box.kind === "call") return identity(model.calls[box.calls[0]!]!);
  return box.title && box.kind === "fold" ? box.title : box.path || "(root)";
}
