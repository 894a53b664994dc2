// Tables: one at a time, sorted by a click on a column's name, filtered by words, copied as CSV or as rules.
import type { Cell, Column, Model, Side, TableData } from "./data";
import { button, copy, h, on, save } from "./dom";
import type { Scope } from "./scope";
import { errorText, formatClass, inBytes, inTime, percent, rulesText, shortCall, shortFile, shortOp } from "./words";

const SHOWN = 100;
const SIDES: Record<string, Side> = { module: 0, call: 0, call_b: 1 };
// The module in an identity, or the path that it is already.
const pathIn = (name: string): string => (/ #\d+/.test(name) ? name.replace(/(^| )\S+ #\d.*$/, "") : name);
const NUMBERS = new Set(["number", "bytes", "ns", "decibels", "bits", "share", "error"]);
// Those that a file of figures names with their columns.
const UNITS = new Set(["bytes", "ns", "decibels", "bits"]);

// What a cell leads to: a module, or a call of one of the runs (false: it is not drawn), by its identity.
export interface Places { open: (path: string) => void; has: (name: string, side: Side) => boolean; reveal: (name: string, side: Side) => void }

export function tables(model: Model, places: Places, scope: Scope): HTMLElement {
  const all = model.page.tables;
  const body = h("div", { class: "table-body" });
  const tabs = all.map((table) =>
    button(`${table.name} ${table.rows.length}`, () => choose(table), { role: "tab", "aria-selected": "false", "data-table": table.name }));
  let shown: TableView | null = null;
  const choose = (table: TableData) => {
    tabs.forEach((tab, i) => tab.setAttribute("aria-selected", String(all[i] === table)));
    shown = new TableView(table, places, scope);
    body.replaceChildren(shown.element);
  };
  scope.changed(() => shown?.fill());
  // Paper has no tabs and no buttons: there each table stands, with all its rows.
  const paper = h("div", { class: "paper" });
  addEventListener("beforeprint", () => paper.replaceChildren(...all.map((table) => new TableView(table, places, scope, Infinity).element)));
  addEventListener("afterprint", () => paper.replaceChildren());
  if (all[0]) choose(all[0]);
  return h("section", { id: "tables", "aria-labelledby": "tables-title" }, h("h2", { id: "tables-title" }, "Tables"), scope.chip(),
    h("div", { class: "tabs", role: "tablist", "aria-label": "Tables" }, ...tabs), paper, body);
}

function cellText(value: Cell, column: Column): string {
  if (value === null) return "";
  if (typeof value === "number") {
    if (column.kind === "bytes") return inBytes(value);
    if (column.kind === "ns") return inTime(value);
    if (column.kind === "decibels") return `${value.toFixed(1)} dB`;
    if (column.kind === "bits") return `${value.toFixed(1)} bits`;
    if (column.kind === "share") return value === 0 ? "0" : percent(value);
    if (column.kind === "error") return errorText(value);
    return Number.isInteger(value) ? String(value) : value.toPrecision(4);
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (column.kind === "op") return shortOp(value);
  if (column.kind in SIDES && column.kind !== "module") return value.split(" + ").map(shortCall).join(" + ");
  if (column.kind === "line") return shortFile(value);
  return column.kind === "module" && value === "" ? "(root)" : value;
}

class TableView {
  readonly element: HTMLElement;
  private by = -1;
  private down = false;
  private words = "";
  private readonly body = h("tbody");
  private readonly heads: HTMLElement[];
  private readonly count = h("span", { class: "quiet" });
  private readonly more: HTMLElement;

  constructor(private readonly table: TableData, private readonly places: Places, private readonly scope: Scope, private shown = SHOWN) {
    this.heads = table.columns.map((column, i) =>
      h("th", { scope: "col", class: NUMBERS.has(column.kind) ? "number" : "", "aria-sort": "none" }, button(column.name, () => this.sort(i))));
    const filter = h("input", { type: "search", class: "filter", placeholder: "Filter rows", "aria-label": `Filter rows of ${table.name}` });
    on(filter, { input: () => { this.words = filter.value.toLowerCase(); this.shown = SHOWN; this.fill(); } });
    this.more = button("Show all rows", () => { this.shown = Infinity; this.fill(); });
    this.element = h("div", {},
      h("div", { class: "tools" }, filter, this.count,
        h("span", { class: "group" },
          button("Copy as CSV", () => void copy(this.csv(), `${this.rows().length} rows`)),
          button("Save as CSV", () => save(this.csv(), `${table.name}.csv`)),
          table.rules.length > 0 && button("Copy as rules (TOML)", () => void copy(this.toml(), "the rules")))),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": table.title },
        h("table", {}, h("caption", {}, table.title), h("thead", {}, h("tr", {}, ...this.heads)), this.body)),
      this.more);
    this.fill();
  }

  private sort(column: number): void {
    this.down = this.by === column ? !this.down : NUMBERS.has(this.table.columns[column]!.kind);
    this.by = column;
    this.heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? (this.down ? "descending" : "ascending") : "none"));
    this.fill();
  }

  // Numbers of rows: filtered, then sorted; what is not known comes last.
  private rows(): number[] {
    const { rows, columns } = this.table;
    const wanted = this.words.split(/\s+/).filter(Boolean);
    const texts = (row: Cell[]) => row.map((value, i) => `${value ?? ""} ${cellText(value, columns[i]!)}`).join(" ").toLowerCase();
    const kept = rows.map((_, i) => i).filter((i) => this.isHeld(rows[i]!) && wanted.every((word) => texts(rows[i]!).includes(word)));
    const by = this.by;
    if (by < 0) return kept;
    const sign = this.down ? -1 : 1;
    return kept.sort((a, b) => {
      const x = rows[a]![by] ?? null, y = rows[b]![by] ?? null;
      if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1;
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return order === 0 ? a - b : sign * order;
    });
  }

  // Whether a row is about a module that is shown: by the first column with a module or a call of each run.
  private isHeld(row: Cell[]): boolean {
    if (!this.scope.active) return true;
    const about = ([0, 1] as Side[]).map((side) => this.table.columns.findIndex((column) => SIDES[column.kind] === side));
    if (about.every((at) => at < 0)) return true;
    return about.some((at, side) => at >= 0 && String(row[at] ?? "").split(" + ").some((name) => this.scope.holds(pathIn(name), side as Side)));
  }

  fill(): void {
    const rows = this.rows();
    this.body.replaceChildren(...rows.slice(0, this.shown).map((i) => h("tr", {}, ...this.table.rows[i]!.map((value, c) => this.cell(value, this.table.columns[c]!)))));
    const all = this.scope.active && !this.table.columns.some((column) => column.kind in SIDES) ? ", of all modules" : "";
    this.count.textContent = `${rows.length} of ${this.table.rows.length} rows${all}`;
    this.more.hidden = rows.length <= this.shown;
  }

  private cell(value: Cell, column: Column): HTMLElement {
    const text = cellText(value, column);
    if (column.kind === "module") {
      const path = String(value ?? "");
      return h("td", {}, button(text, () => this.places.open(path), { class: "link", title: "Show in the graph" }));
    }
    if (column.kind === "call" || column.kind === "call_b") {
      const side = SIDES[column.kind]!, names = String(value ?? "").split(" + ").filter(Boolean);
      const shown = names.flatMap((name, i) => [i > 0 ? " + " : "", this.places.has(name, side)
        ? button(shortCall(name), () => this.places.reveal(name, side), { class: "link", title: name }) : shortCall(name)]);
      return h("td", { class: "calls" }, ...shown);
    }
    if (column.kind === "format" && text)
      return h("td", {}, ...text.split(",").map((name) => h("b", { class: `chip ${formatClass(name)}` }, name)));
    if (column.kind === "line" || column.kind === "op") return h("td", { class: "name", title: String(value ?? "") }, text);
    return h("td", { class: NUMBERS.has(column.kind) ? "number" : column.kind === "text" && text.length > 40 ? "long" : "" }, text);
  }

  private csv(): string {
    const field = (value: Cell): string => {
      const text = value === null ? "" : String(value);
      return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const lines = this.rows().map((i) => this.table.rows[i]!.map(field).join(","));
    return [this.table.columns.map((column) => field(UNITS.has(column.kind) ? `${column.name} (${column.kind})` : column.name)).join(","), ...lines, ""].join("\n");
  }

  private toml(): string {
    return rulesText(this.table, this.rows());
  }
}
