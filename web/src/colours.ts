// What a box is coloured by: the format, the error, the cost, or how far two runs are apart. Each has words beside it, so colour is never alone.
import { type Model, byFormat } from "./data";
import type { Marks } from "./draw";
import type { Box } from "./tree";
import { errorText, formatClass, inBytes, inTime } from "./words";

export type By = "format" | "error" | "cost" | "difference";

export interface Scale { classOf: (box: Box) => string; text: (box: Box) => string }

const STEPS = 6;

function largest(values: (number | null)[]): number | null {
  const known = values.filter((v): v is number => v !== null);
  return known.length > 0 ? Math.max(...known) : null;
}

export function scale(model: Model, by: By, marks: Marks | null = null): Scale {
  if (by === "difference") return { classOf: (box) => marks?.of(box)?.kind ?? "", text: () => "" };
  if (by === "format")
    return { classOf: (box) => formatClass(byFormat(model, box.calls)[0]?.[0] ?? ""), text: () => "" };
  const timed = model.calls.some((call) => call.ns !== null);
  const value = (index: number): number | null => {
    const call = model.calls[index]!;
    return by === "error" ? call.local : timed ? call.ns : call.bytes;
  };
  const all = model.calls.map((call) => value(call.index)).filter((v): v is number => v !== null && v > 0);
  const low = Math.log(Math.min(...all)), high = Math.log(Math.max(...all));
  const of = (box: Box): number | null => {
    const values = box.calls.map(value);
    if (by === "error") return largest(values);
    const known = values.filter((v): v is number => v !== null);
    return known.length > 0 ? known.reduce((a, b) => a + b, 0) : null;
  };
  return {
    classOf: (box) => {
      const v = of(box);
      if (v === null) return "unknown";
      if (v <= 0) return "heat0";
      const share = high > low ? (Math.log(v) - low) / (high - low) : 1;
      return `heat${Math.max(0, Math.min(STEPS, Math.round(share * STEPS)))}`;
    },
    text: (box) => {
      const v = of(box);
      if (v === null) return "not known";
      return by === "error" ? `local error ${errorText(v)}` : timed ? inTime(v) : inBytes(v);
    },
  };
}
