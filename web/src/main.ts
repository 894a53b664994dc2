// The page: its data is read once, then drawn section by section.
import { Controls } from "./controls";
import { type Call, type PageData, Model, unpackTables } from "./data";
import { button, h } from "./dom";
import type { GraphView } from "./graph";
import { overview } from "./overview";
import { PairView, pairFilters } from "./pair";
import { Partners } from "./partners";
import { Plots } from "./plots";
import { Scope } from "./scope";
import { single } from "./single";
import { type Places, tables } from "./tables";

const THEMES = ["auto", "light", "dark"];

function theme(change: () => void): HTMLElement {
  let at = 0;
  const made = button("Theme: auto", () => {
    at = (at + 1) % THEMES.length;
    const name = THEMES[at]!;
    made.textContent = `Theme: ${name}`;
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    change();
  }, { id: "theme" });
  return made;
}

// The section of the graph, its views, and how the search is reached: of one run, or of two.
interface Graphs { element: HTMLElement; views: GraphView[]; start: () => void; focusSearch: () => void }

function graphs(data: PageData, model: Model, scope: Scope, plots: Plots): Graphs {
  if (!data.pair) {
    const { element, view } = single(model, scope, plots);
    return { element, views: [view], start: () => view.start(), focusSearch: () => view.search.focus() };
  }
  const there = new Model(data, data.pair.graph, data.pair.names[1]);
  const partners = new Partners([model, there], data.pair);
  const controls = new Controls([...model.calls, ...there.calls], ["difference", "format", "cost"], pairFilters(partners));
  const pair = new PairView(partners, data.pair.names, controls, scope);
  return { element: pair.element, views: pair.views, start: () => pair.start(), focusSearch: () => pair.focusSearch() };
}

function main(): void {
  const data = JSON.parse(document.getElementById("data")!.textContent!) as PageData;
  unpackTables(data);
  const model = new Model(data, data.graph, data.pair ? data.pair.names[0] : data.title);
  const scope = new Scope();
  const plots: Plots = new Plots(model, (call) => shown.views[0]!.reveal(call));
  const shown = graphs(data, model, scope, plots);
  const named = (name: string, side: number): Call | undefined => shown.views[side]?.model.call(name);
  const places: Places = {
    open: (path) => {
      shown.views[0]!.open(path);
      shown.element.scrollIntoView({ block: "start" });
    },
    has: (name, side) => named(name, side) !== undefined,
    reveal: (name, side) => shown.views[side]!.reveal(named(name, side)!),
  };
  const hasCalls = shown.views.some((view) => view.model.calls.length > 0);
  const hasTables = data.tables.length > 0;
  const sections = ["Overview", ...(hasCalls ? ["Graph"] : []), ...(hasTables ? ["Tables"] : []), ...(plots.any ? ["Plots"] : [])];
  document.getElementById("page")!.replaceChildren(
    h("a", { class: "skip", href: "#overview" }, "To the overview"),
    h("header", {}, h("h1", {}, data.title), h("span", { class: "kind" }, `Narrowcast ${data.kind}`),
      h("nav", { "aria-label": "Sections" }, ...sections.map((name) => h("a", { href: `#${name.toLowerCase()}` }, name))),
      theme(() => plots.draw())),
    h("main", {}, overview(model, places.open), hasCalls ? shown.element : null, hasTables ? tables(model, places, scope) : null, plots.element));
  shown.start();
  plots.draw();
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test((event.target as Element).tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      shown.focusSearch();
    }
  });
  document.documentElement.dataset.ready = "yes";
}

main();
