// Words that find calls: by module, op and source line.
import type { Call, Model } from "./data";
import { button, h, on } from "./dom";
import { counted, identity, shortOp } from "./words";

const FOUND = 12;

export class Search {
  readonly element: HTMLElement;
  private readonly found = h("ul", { class: "found" });
  private readonly input: HTMLInputElement;

  // pick: what happens with the call that was chosen; leave: after Escape.
  constructor(
    id: string, label: string, private readonly model: Model, private readonly keep: (call: Call) => boolean,
    private readonly pick: (call: Call) => void, private readonly leave: () => void,
  ) {
    this.input = h("input", { type: "search", id, placeholder: "Search modules and ops ( / )", "aria-label": label });
    on(this.input, { input: () => this.list(), keydown: (event) => this.key(event) });
    this.element = h("div", { class: "searching" }, this.input, this.found);
  }

  focus(): void {
    this.input.focus();
    this.input.scrollIntoView({ block: "center" });
  }

  private matches(): Call[] {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length === 0) return [];
    return this.model.calls.filter((call) => {
      const text = `${identity(call)} ${call.file}:${call.line}`.toLowerCase();
      return this.keep(call) && words.every((word) => text.includes(word));
    });
  }

  private list(): void {
    const found = this.matches();
    const rows = found.slice(0, FOUND).map((call) =>
      h("li", {}, button(`${call.path || "(root)"} · ${shortOp(call.op)} ${call.label}`, () => this.take(call))));
    if (found.length > FOUND) rows.push(h("li", {}, `and ${counted(found.length - FOUND, "call")} more`));
    if (found.length === 0 && this.input.value.trim()) rows.push(h("li", {}, "No call is named so."));
    this.found.replaceChildren(...rows);
  }

  private take(call: Call): void {
    this.found.replaceChildren();
    this.pick(call);
  }

  private key(event: KeyboardEvent): void {
    if (event.key === "Enter") {
      const first = this.matches()[0];
      if (first) this.take(first);
    } else if (event.key === "Escape") {
      this.input.value = "";
      this.found.replaceChildren();
      this.leave();
    }
  }
}
