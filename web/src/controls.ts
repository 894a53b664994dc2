// What graphs are coloured by, and which calls they show: one choice for all graphs on the page.
import type { By } from "./colours";
import { type Call, type Model, isLeak } from "./data";
import { h, on } from "./dom";

export type Filter = [string, string, (model: Model, call: Call) => boolean];

const floats = (call: Call): boolean => Boolean(call.input_formats || call.computes || call.result || call.finding);

const FILTERS: Filter[] = [
  ["forward", "Forward calls with floating tensors", (_, call) => call.direction === "forward" && floats(call)],
  ["floats", "Calls with floating tensors", (_, call) => floats(call)],
  ["all", "All calls", () => true],
  ["casts", "Only with casts", (model, call) => model.castsInto[call.index]!.length > 0],
  ["leaks", "Only fp32 that no rule asked for", (_, call) => isLeak(call)],
  ["findings", "Only findings", (_, call) => call.finding !== ""],
  ["low", "Only in a low format", (_, call) => /bf16|fp16|e4m3|e5m2/.test(call.computes)],
  ["backward", "Only backward", (_, call) => call.direction !== "forward"],
];

export class Controls {
  readonly elements: HTMLElement[];
  by: By;
  private readonly filters: Filter[];
  private readonly filter: HTMLSelectElement;
  private readonly listeners: (() => void)[] = [];

  // more: filters besides those that every page has.
  constructor(calls: Call[], scales: By[], more: Filter[] = []) {
    this.filters = [...FILTERS, ...more];
    this.by = scales[0]!;
    const by = h("select", { id: "by", "aria-label": "Colour by" }, ...scales.map((name) => h("option", { value: name }, `Colour by ${name}`)));
    on(by, { change: () => { this.by = by.value as By; this.tell(); } });
    this.filter = h("select", { id: "filter", "aria-label": "Show" }, ...this.filters.map(([name, text]) => h("option", { value: name }, text)));
    const forward = calls.filter((call) => call.direction === "forward");
    const both = forward.length > 0 && forward.length < calls.length;
    this.filter.value = !forward.some(floats) ? "all" : both ? "forward" : "floats";
    on(this.filter, { change: () => this.tell() });
    this.elements = [by, this.filter];
  }

  changed(listener: () => void): void {
    this.listeners.push(listener);
  }

  keeps(model: Model, call: Call): boolean {
    return this.filters.find(([name]) => name === this.filter.value)![2](model, call);
  }

  // A call that somebody asks for is shown.
  letSee(model: Model, call: Call): void {
    if (this.keeps(model, call)) return;
    this.filter.value = "all";
    this.tell();
  }

  private tell(): void {
    for (const listener of this.listeners) listener();
  }
}
