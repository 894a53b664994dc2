// The page: its data is read once, then drawn section by section.
import { type PageData, Model } from "./data";
import { button, h } from "./dom";
import { GraphView } from "./graph";
import { overview } from "./overview";
import { Plots } from "./plots";
import { tables } from "./tables";

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

function main(): void {
  const data = JSON.parse(document.getElementById("data")!.textContent!) as PageData;
  const model = new Model(data);
  const plots: Plots = new Plots(model, (call) => graph.reveal(call));
  const graph = new GraphView(model, { histogram: (call) => plots.show(call), has: (call) => plots.has(call) });
  const open = (path: string) => {
    graph.open(path);
    graph.element.scrollIntoView({ block: "start" });
  };
  const sections = ["Overview", ...(model.calls.length > 0 ? ["Graph"] : []), "Tables", ...(plots.any ? ["Plots"] : [])];
  document.getElementById("page")!.replaceChildren(
    h("a", { class: "skip", href: "#overview" }, "To the overview"),
    h("header", {}, h("h1", {}, data.title), h("span", { class: "kind" }, `Narrowcast ${data.kind}`),
      h("nav", { "aria-label": "Sections" }, ...sections.map((name) => h("a", { href: `#${name.toLowerCase()}` }, name))),
      theme(() => plots.draw())),
    h("main", {}, overview(model, open), model.calls.length > 0 ? graph.element : null, tables(model, open), plots.element));
  graph.start();
  plots.draw();
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test((event.target as Element).tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      graph.focusSearch();
    }
  });
  document.documentElement.dataset.ready = "yes";
}

main();
