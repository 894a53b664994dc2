// The whole run as one strip, from its first call to its last, in the colours of the graph: where errors grow, and where
// formats change. A click shows what is there.
import { scale } from "./colours";
import type { Controls } from "./controls";
import type { Call, Model } from "./data";
import { h, s } from "./dom";
import type { Scope } from "./scope";
import type { Box } from "./tree";
import { identity } from "./words";

const MOST = 400, LEAST = 8, HEIGHT = 10;
const HEAT = /^heat(\d)$/;

export function strip(model: Model, controls: Controls, scope: Scope, reveal: (call: Call) => void): HTMLElement {
  const element = h("figure", { class: "strip" });
  const show = () => {
    const calls = model.calls.filter((call) => controls.keeps(model, call) && scope.holds(call.path));
    element.hidden = calls.length < LEAST;
    if (element.hidden) return element.replaceChildren();
    const parts = divided(calls);
    const of = scale(model, controls.by);
    const text = `${calls.length} calls in the order of the run, coloured by ${controls.by}`;
    const picture = s("svg", {
      role: "img", "aria-label": text, viewBox: `0 0 ${parts.length} ${HEIGHT}`, preserveAspectRatio: "none",
    }, ...parts.map((part, n) => {
      const first = part.find((call) => call.finding !== "") ?? part[0]!;
      const boxes = part.map((call) => ({ calls: [call.index] }) as Box);
      const strongest = boxes.reduce((a, b) => (heat(of.classOf(b)) > heat(of.classOf(a)) ? b : a));
      const words = [identity(first), of.text(strongest), first.finding].filter(Boolean).join("\n");
      const title = s("title", {}, part.length > 1 ? `${words}\nand ${part.length - 1} more` : words);
      const spot = s("rect", { class: of.classOf(strongest), x: n, y: 0, width: 1, height: HEIGHT }, title);
      if (part.some((call) => call.finding !== "")) spot.classList.add("found");
      spot.addEventListener("click", () => reveal(first));
      return spot;
    }));
    element.replaceChildren(picture, h("figcaption", { class: "quiet" }, `${text}, from ${identity(calls[0]!)} to ${identity(calls.at(-1)!)}`));
  };
  controls.changed(show);
  scope.changed(show);
  show();
  return element;
}

function heat(name: string): number {
  return Number(HEAT.exec(name)?.[1] ?? -1);
}

// At most this many parts, each of calls that follow each other.
function divided(calls: Call[]): Call[][] {
  const size = Math.ceil(calls.length / MOST);
  return Array.from({ length: Math.ceil(calls.length / size) }, (_, n) => calls.slice(n * size, (n + 1) * size));
}
