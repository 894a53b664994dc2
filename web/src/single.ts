// The section of one graph.
import { Controls } from "./controls";
import { type Call, type Model } from "./data";
import { h } from "./dom";
import { GraphView } from "./graph";
import type { Scope } from "./scope";
import { strip } from "./strip";

export interface Histograms { show: (call: Call) => void; has: (call: Call) => boolean }

export function single(model: Model, scope: Scope, plots: Histograms): { element: HTMLElement; view: GraphView } {
  const controls = new Controls(model.calls, ["format", "error", "cost"]);
  const view = new GraphView(model, {
    side: 0, suffix: "", label: "", controls, scope, marks: null, word: () => "", moved: () => {}, keys: {}, more: () => [],
    histogram: (call) => plots.show(call), has: (call) => plots.has(call),
    narrow: (box) => {
      const paths = box.kind === "call" ? [box.path] : box.members.map((member) => member.path);
      if (paths.length > 0 && paths.some(Boolean)) scope.set(box.kind === "fold" ? box.title : paths[0]!, [paths, []]);
    },
  });
  view.search.element.after(...controls.elements);
  const element = h("section", { id: "graph", "aria-labelledby": "graph-title" },
    h("h2", { id: "graph-title" }, "Graph"), view.tools, scope.chip(),
    strip(model, controls, scope, (call) => view.reveal(call)), view.crumbs,
    h("div", { class: "split" }, view.stage, view.side),
    h("p", { class: "quiet keys" }, "Keys: arrows move, Enter opens, Backspace goes up, / searches, n and p go through findings, i opens a module in its place or closes it, o shows only this module, w a s d pan, + − 0 zoom."),
    model.graph.note && h("p", { class: "quiet" }, model.graph.note));
  return { element, view };
}
