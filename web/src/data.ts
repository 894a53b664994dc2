// The data of the page (narrowcast.page/1, see src/narrowcast/reports/documents/model.py), and what is asked of it.
import { identity } from "./words";

export interface Figure { name: string; value: string; detail: string; tone: string }
export interface Bar { title: string; unit: "calls" | "bytes" | "multiplications" | "ns" | "pairs"; parts: [string, number][] }
export type Rule = Record<string, string>;
export interface Todo { what: string; why: string; rule: Rule; path: string }
export interface Column { name: string; kind: string }
export type Cell = string | number | boolean | null;
export interface TableData { name: string; title: string; columns: Column[]; rows: Cell[][]; rules: Rule[]; shared: [string, string][]; texts: number[] }
export interface Series {
  title: string; x: string; y: string; x_unit: string; y_unit: string; xs: number[]; lines: [string, (number | null)[]][]; log: boolean; nodes: number[];
  log_x: boolean; kind: "lines" | "stems"; marks: [number, number, string][]; note: string;
}
export interface Exponents { node: number; name: string; format: string; first: number; counts: number[] }
export interface Range { bits: number; largest: number; normal: number; smallest: number }

export interface Call {
  index: number; path: string; op: string; label: string; times: number; direction: string; input_formats: string;
  computes: string; result: string; action: string; rule: string; reason: string; file: string; line: number;
  bytes: number | null; multiplications: number | null; ns: number | null; local: number | null; propagated: number | null; total: number | null;
  verdict: string; finding: string; facts: [string, string][];
}
export interface Edge {
  start: number; end: number; argument: string; src: string; dst: string; bytes: number; kind: string; how: string;
  shape: string; times: number;
}
export interface Packed {
  flow: boolean; note: string; node_columns: string[]; nodes: unknown[][]; edge_columns: string[]; edges: unknown[][];
  text_columns: string[]; texts: string[];
}
export interface PageData {
  schema: string; kind: string; title: string; verdict: string; tone: string; facts: [string, string][];
  figures: Figure[]; bars: Bar[]; todos: Todo[]; tables: TableData[]; graph: Packed; series: Series[];
  exponents: Exponents[]; notes: string[]; formats: Record<string, Range>; pair?: PairData;
  texts: string[]; // of tables and pairs
}
// The second of two runs; rows are those of PairRow in model.py.
export interface PairData {
  names: [string, string]; graph: Packed; mapping: string; columns: string[]; rows: unknown[][]; text_columns: string[];
}
export type Side = 0 | 1;

// Rows as records; in columns of texts, numbers represent these.
export function unpack(columns: string[], rows: unknown[][], ofTexts: string[], texts: string[]): Record<string, unknown>[] {
  const known = new Set(ofTexts);
  return rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, known.has(name) ? texts[row[i] as number] : row[i]])));
}

// The texts of tables, where numbers stood for them.
export function unpackTables(page: PageData): void {
  for (const table of page.tables)
    for (const row of table.rows)
      for (const column of table.texts) row[column] = row[column] === null ? null : page.texts[row[column] as number]!;
}

export class Model {
  readonly calls: Call[];
  readonly edges: Edge[];
  readonly castsInto: Edge[][];
  private readonly named = new Map<string, number>();
  // The graph of the page, or the other one of two; `name` is what its outermost module is called.
  constructor(readonly page: PageData, readonly graph: Packed = page.graph, readonly name: string = page.title) {
    const nodes = unpack(graph.node_columns, graph.nodes, graph.text_columns, graph.texts) as unknown as Call[];
    this.calls = nodes.map((call, index) => ({ ...call, index }));
    this.edges = unpack(graph.edge_columns, graph.edges, graph.text_columns, graph.texts) as unknown as Edge[];
    this.castsInto = this.calls.map(() => []);
    for (const edge of this.edges) if (isCast(edge)) this.castsInto[edge.end]?.push(edge);
    for (const call of this.calls) this.named.set(identity(call), call.index);
  }
  call(named: string): Call | undefined {
    return this.calls[this.named.get(named) ?? -1];
  }
  findings(): Call[] {
    return this.calls.filter((call) => call.finding !== "");
  }
}

export const isCast = (edge: Edge): boolean => edge.src !== edge.dst;

// A call in fp32 that no rule asked to be there: its inputs made it so.
export const isLeak = (call: Call): boolean =>
  call.computes.split(",").includes("fp32") && (call.action === "" || call.action === "no rule") && call.rule === "";

export function sums(model: Model, calls: number[]): { calls: number; casts: number; castBytes: number; bytes: number } {
  const found = { calls: 0, casts: 0, castBytes: 0, bytes: 0 };
  for (const index of calls) {
    const call = model.calls[index]!;
    found.calls += call.times;
    found.bytes += call.bytes ?? 0;
    for (const cast of model.castsInto[index]!) {
      found.casts += cast.times;
      found.castBytes += cast.bytes;
    }
  }
  return found;
}

export function byFormat(model: Model, calls: number[]): [string, number][] {
  const found = new Map<string, number>();
  for (const index of calls) {
    const call = model.calls[index]!;
    if (call.computes) found.set(call.computes, (found.get(call.computes) ?? 0) + call.times);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}
