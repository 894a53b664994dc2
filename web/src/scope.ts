// «Only module X»: what the graph, its search, its findings and the tables are restricted to.
import type { Side } from "./data";
import { button, h } from "./dom";

export class Scope {
  private title = "";
  private paths: [string[], string[]] = [[], []];
  private readonly listeners: (() => void)[] = [];

  get active(): boolean {
    return this.title !== "";
  }

  // paths: of modules, those of the first run and of the second.
  set(title: string, paths: [string[], string[]]): void {
    this.title = title;
    this.paths = paths;
    for (const listener of this.listeners) listener();
  }

  clear(): void {
    if (this.active) this.set("", [[], []]);
  }

  holds(path: string, side: Side = 0): boolean {
    return !this.active || this.paths[side].some((of) => of === "" || path === of || path.startsWith(`${of}.`));
  }

  changed(listener: () => void): void {
    this.listeners.push(listener);
  }

  // What says that less is shown, and ends it.
  chip(): HTMLElement {
    const text = h("span");
    const made = h("span", { class: "only", role: "status" }, text,
      button("×", () => this.clear(), { class: "link", "aria-label": "Show all modules again", title: "Show all modules again (o)" }));
    const show = () => {
      made.hidden = !this.active;
      text.textContent = this.active ? `Only ${this.title} ` : "";
    };
    this.changed(show);
    show();
    return made;
  }
}
