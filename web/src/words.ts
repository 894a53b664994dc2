// Numbers, names and rules in words; colours by name.
import type { Call, Edge, Rule, TableData } from "./data";

export function inBytes(count: number): string {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(count) < 1024) return unit === "B" ? `${Math.round(count)} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}

const digits = (value: number): string => String(Number(value.toPrecision(3)));

export const inTime = (ns: number): string =>
  ns < 0 ? `-${inTime(-ns)}` : ns >= 1e9 ? `${digits(ns / 1e9)} s` : ns >= 1e6 ? `${digits(ns / 1e6)} ms` : ns >= 1e3 ? `${digits(ns / 1e3)} µs` : `${Math.round(ns)} ns`;

export function inCount(count: number): string {
  for (const unit of ["", " k", " M", " G", " T"]) {
    if (Math.abs(count) < 1000) return `${unit === "" ? Math.round(count) : digits(count)}${unit}`;
    count /= 1000;
  }
  return `${digits(count)} P`;
}

// A number of any size, in three digits: small ones by their power of ten.
export const inFigure = (value: number): string =>
  value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(1) : Math.abs(value) < 1000 ? digits(value) : inCount(value);

// On an axis, whose lines lie at powers of ten.
export const inDecimalBytes = (count: number): string => `${inCount(count).replace(/([a-zA-Z]?)$/, count < 1000 ? " B" : "$1B")}`;

export const errorText = (value: number): string => (value === 0 ? "0" : value.toExponential(1));

export const percent = (share: number): string =>
  share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export const counted = (n: number, one: string): string => `${n} ${one}${n === 1 ? "" : "s"}`;

export const shortOp = (op: string): string =>
  op.replace(/^(aten|torch|prims)\./, "").replace(/\.default$/, "");

// An identity with its op as it is drawn.
export const shortCall = (name: string): string =>
  name.replace(/(^| )(?:aten|torch|prims)\.(\S+) #/, (_, before: string, op: string) => `${before}${op.replace(/\.default$/, "")} #`);

// Files of installed packages by their package; the whole path stands in the title.
export const packageFile = (file: string): string => file.replace(/^.*\/(site|dist)-packages\//, "");

export const shortFile = (file: string): string => file.split("/").slice(-1)[0] ?? file;

export const formatClass = (format: string): string => {
  const known = ["fp64", "fp32", "bf16", "fp16"];
  if (known.includes(format)) return format;
  return format.includes(",") ? "mixed" : /^e[45]m/.test(format) ? "fp8" : "other";
};

export const verdictClass = (verdict: string): string => `is-${verdict.replaceAll(" ", "-")}`;

// The class of a part of a bar: a verdict; a change from one format to another, by what it became; or a format.
const VERDICTS = new Set(["equal", "round-off", "propagated", "differs", "not compared"]);
export const partClass = (name: string): string =>
  VERDICTS.has(name) ? verdictClass(name) : formatClass(name.split(" → ").slice(-1)[0]!);

export const identity = (call: Call): string =>
  [call.path, call.op, call.label, call.direction === "forward" ? "" : call.direction].filter(Boolean).join(" ");

export function castText(edge: Edge): string {
  const how = edge.how === "copied" || edge.how === "" ? "" : `, ${edge.how}`;
  const times = edge.times > 1 ? ` × ${edge.times}` : "";
  return `${edge.src} → ${edge.dst}${times}, ${inBytes(edge.bytes)}${how}`;
}

const quoted = (value: string): string =>
  `"${value
    .replace(/\\/g, "\\\\")
    .replace(/"/g, '\\"')
    .replace(/[\u0000-\u001f\u007f]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`)}"`;

export const ruleText = (rule: Rule): string =>
  ["[[rule]]", ...Object.entries(rule).map(([key, value]) => `${key} = ${quoted(value)}`)].join("\n");

// The rules of some rows of a table; modules that differ by the number of their layer share one, if all of them are there.
export function rulesText(table: Pick<TableData, "rules" | "shared">, kept: number[]): string {
  const names = table.rules.map((rule) => {
    const module = (rule.module ?? "").replace(/(?<=\.)\d+(?![^.])/g, "*");
    return table.shared.some(([op, glob]) => op === rule.op && glob === module) ? { key: `${rule.op} ${module}`, module } : null;
  });
  const shown = new Set(kept), rows = table.rules.map((_, i) => i);
  const parts = new Set(rows.filter((i) => !shown.has(i)).map((i) => names[i]?.key));
  const texts = kept.filter((i) => table.rules[i]!.op).map((i) => {
    const name = names[i];
    return ruleText(name && !parts.has(name.key) ? { ...table.rules[i]!, module: name.module } : table.rules[i]!);
  });
  return `${[...new Set(texts)].join("\n\n")}\n`;
}

// The rule that changes in which format a call computes; none for what no policy is asked about.
export function changingRule(call: Call, everywhere: boolean): Rule | null {
  const low = call.computes.split(",").some((name) => ["bf16", "fp16"].includes(name) || formatClass(name) === "fp8");
  const isAsked = call.direction === "forward" && (low || call.computes === "fp32") && !/^(module\.call|aten\._to_copy)\./.test(call.op);
  const module: Rule = call.path && !everywhere ? { module: call.path.replace(/[*?[]/g, "[$&]") } : {};
  return isAsked ? { op: call.op, ...module, action: low ? "full" : "lower" } : null;
}
