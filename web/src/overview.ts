// The first screen: what was inspected, the verdict, the figures, shares by format, what is worth doing.
import type { Bar, Model, Todo } from "./data";
import { button, copy, h } from "./dom";
import { counted, inBytes, inCount, inTime, partClass, percent, ruleText } from "./words";

// As many recommendations as a first screen has; the others are folded.
const FIRST_TODOS = 3;

export function overview(model: Model, open: (path: string) => void): HTMLElement {
  const page = model.page;
  const figures = page.figures.map((figure) =>
    h("div", { class: `figure ${figure.tone}` },
      h("dt", {}, figure.name), h("dd", {}, h("strong", {}, figure.value), h("span", {}, figure.detail))));
  return h("section", { id: "overview", "aria-labelledby": "overview-title" },
    h("div", { class: "facts-row" },
      h("h2", { id: "overview-title", class: `verdict ${page.tone}` }, page.verdict),
      h("dl", { class: "facts" }, ...page.facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))),
    h("dl", { class: "figures" }, ...figures),
    h("div", { class: "columns" },
      page.bars.length > 0 && h("div", { class: "bars" }, ...page.bars.map(bar), legend(page.bars)),
      todos(page.pair ? "Look here first" : "Recommendations", page.todos, model.calls.length > 0 ? open : null)),
    page.notes.length > 0 && h("div", { class: "notes" }, ...page.notes.map((note) => h("p", {}, note))));
}

function amount(bar: Bar, value: number): string {
  if (bar.unit === "bytes") return inBytes(value);
  if (bar.unit === "multiplications") return `${inCount(value)} multiplications`;
  return bar.unit === "ns" ? inTime(value) : `${value} ${bar.unit}`;
}

// room: how many letters fit into the whole bar.
export function shareBar(parts: [string, number][], described: (name: string, value: number) => string, room = 70): HTMLElement {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  return h("div", { class: "bar", role: "img", "aria-label": parts.map(([n, v]) => described(n, v)).join("; ") },
    ...parts.map(([name, value]) => {
      const share = value / whole;
      const part = h("div", { class: `part ${partClass(name)}`, title: described(name, value) });
      part.style.flexGrow = String(Math.max(share, 0.004));
      const text = `${name} ${percent(share)}`;
      if (share * room > text.length) part.append(h("span", {}, text));
      return part;
    }));
}

function bar(of: Bar): HTMLElement {
  return h("div", { class: "bar-block" }, h("h3", {}, of.title),
    shareBar(of.parts, (name, value) => `${name}: ${amount(of, value)}`));
}

function legend(bars: Bar[]): HTMLElement | null {
  const names = [...new Set(bars.flatMap((b) => b.parts.map(([name]) => name)))];
  if (names.length === 0) return null;
  const said = new Set(bars.map((b) => b.unit)).size === bars.length;
  const items = names.map((name) => {
    if (!said) return h("li", {}, h("i", { class: `swatch ${partClass(name)}` }), name);
    const sums = bars.map((b) => {
      const part = b.parts.find(([n]) => n === name);
      return part ? amount(b, part[1]) : null;
    });
    return h("li", {}, h("i", { class: `swatch ${partClass(name)}` }), `${name}: ${byUnit(bars, sums).join(", ")}`);
  });
  return h("ul", { class: "legend" }, ...items);
}

// Of two runs, what a has and what b has: `80 calls / 18 calls`.
function byUnit(bars: Bar[], sums: (string | null)[]): string[] {
  return [...new Set(bars.map((b) => b.unit))].map((unit) => {
    const here = sums.filter((_, i) => bars[i]!.unit === unit);
    const known = here.filter(Boolean);
    return unit === "pairs" || known.length === 0 ? known.join(", ") : here.map((sum) => sum ?? "none").join(" / ");
  }).filter(Boolean);
}

function todos(title: string, found: Todo[], open: ((path: string) => void) | null): HTMLElement {
  const item = (todo: Todo): HTMLElement =>
    h("li", {},
      h("p", {}, h("strong", {}, todo.what)),
      todo.why && h("p", { class: "quiet" }, todo.why),
      Object.keys(todo.rule).length > 0 && ruleBlock(ruleText(todo.rule)),
      open && todo.path && button("Show in the graph", () => open(todo.path), { class: "link" }));
  const left = found.slice(FIRST_TODOS);
  const folded = h("details", {}, h("summary", {}, counted(left.length, "more recommendation")),
    h("ol", { start: FIRST_TODOS + 1 }, ...left.map(item)));
  addEventListener("beforeprint", () => { folded.open = true; });
  return h("div", { class: "todos" }, h("h3", {}, title),
    found.length > 0 ? h("ol", {}, ...found.slice(0, FIRST_TODOS).map(item)) : h("p", { class: "quiet" }, "No recommendations."),
    left.length > 0 && folded);
}

export function ruleBlock(text: string): HTMLElement {
  return h("div", { class: "rule" }, h("pre", { tabindex: 0, "aria-label": "rule for a policy file" }, text),
    button("Copy", () => void copy(text, "the rule"), { "aria-label": "Copy the rule" }));
}
