// Plots, with uPlot: errors by depth, figures over steps, casts along a run, times over sizes, histograms of exponents under the formats' ranges.
import uPlot from "uplot";
import type { Call, Exponents, Model, Series } from "./data";
import { h, on } from "./dom";
import { errorText, identity, inCount, inDecimalBytes, inFigure, inTime } from "./words";

const HEIGHT = 300, SMALL = 210;
const MULTIPLES = 4; // from this number on plots are small, beside each other
const RANGES = ["fp32", "bf16", "fp16", "e5m2", "e4m3fn"];
const colour = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LINES = ["--line1", "--line2", "--line3", "--line4", "--line5"];

// What is said of a value in a unit; logarithmic axes leave the lines between powers of ten without words.
const UNITS: Record<string, (value: number) => string> = {
  bytes: inDecimalBytes, ns: inTime, relative: errorText, multiplications: inCount, whole: (value) => String(value), percent: (value) => `${inFigure(value)} %`,
};
const words = (unit: string): ((value: number) => string) => UNITS[unit] ?? inFigure;

const ticks = (unit: string): uPlot.Axis["values"] => (_, values) => values.map((v) => (v === null ? "" : words(unit)(v)));

// A thin line up to each point, for what happens now and then.
const stems: uPlot.Series.PathBuilder = (plot, series, from, to) => {
  const path = new Path2D();
  const bottom = plot.bbox.top + plot.bbox.height;
  for (let i = from; i <= to; i++) {
    const value = plot.data[series]![i];
    if (value === null || value === undefined) continue;
    const x = plot.valToPos(plot.data[0]![i]!, "x", true);
    path.moveTo(x, bottom);
    path.lineTo(x, plot.valToPos(value, "y", true));
  }
  return { stroke: path };
};

function drawMarks(plot: uPlot, marks: Series["marks"]): void {
  const { ctx } = plot;
  const ratio = uPlot.pxRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.strokeStyle = ctx.fillStyle = colour("--text");
  ctx.lineWidth = 1.5 * ratio;
  for (const [x, y, said] of marks) {
    const [left, top] = [plot.valToPos(x, "x", true), plot.valToPos(y, "y", true)];
    const onTheRight = left > plot.bbox.left + plot.bbox.width / 2;
    ctx.beginPath();
    ctx.arc(left, top, 6 * ratio, 0, 2 * Math.PI);
    ctx.stroke();
    ctx.textAlign = onTheRight ? "right" : "left";
    ctx.fillText(said, left + (onTheRight ? -10 : 10) * ratio, top + 14 * ratio);
  }
  ctx.restore();
}

// Lines of formats have their colours, others one after the other.
const lineColour = (label: string, i: number): string =>
  colour(/^(fp|bf)\d+$/.test(label) ? `--${label}` : LINES[i % LINES.length]!);

const MOST_POINTS = 60;

function axis(label: string, unit?: string): uPlot.Axis {
  const made: uPlot.Axis = {
    label, stroke: colour("--text"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 },
    font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
  };
  if (unit === "whole") made.incrs = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000];
  return unit === undefined ? made : { ...made, values: ticks(unit) };
}

export class Plots {
  readonly element: HTMLElement;
  private readonly holders: { holder: HTMLElement; make: (width: number) => uPlot }[] = [];
  private drawn: uPlot[] = [];
  private readonly chosen = h("select", { id: "exponents", "aria-label": "Whose exponents" });

  constructor(private readonly model: Model, private readonly reveal: (call: Call) => void) {
    const { series, exponents } = model.page;
    const alike = new Map<string, Series[]>();
    for (const one of series) alike.set(axesOf(one), [...(alike.get(axesOf(one)) ?? []), one]);
    const isSmall = series.length >= MULTIPLES;
    const made = series.map((one) => this.block(one.title, describe(one), (width) => this.lines(one, width, isSmall ? alike.get(axesOf(one))! : [])));
    const blocks = isSmall ? [h("div", { class: "multiples" }, ...made)] : made;
    if (exponents.length > 0) blocks.push(this.histograms());
    this.element = h("section", { id: "plots", "aria-labelledby": "plots-title" }, h("h2", { id: "plots-title" }, "Plots"), ...blocks);
    this.element.hidden = blocks.length === 0;
    window.addEventListener("resize", () => this.draw());
  }

  get any(): boolean {
    return !this.element.hidden;
  }

  has(call: Call): boolean {
    return this.model.page.exponents.some((row) => row.node === call.index);
  }

  show(call: Call): void {
    this.chosen.value = String(this.model.page.exponents.findIndex((row) => row.node === call.index));
    this.draw();
    this.chosen.scrollIntoView({ block: "center" });
    this.chosen.focus({ preventScroll: true });
  }

  draw(): void {
    for (const plot of this.drawn) plot.destroy();
    this.drawn = this.holders.map(({ holder, make }) => {
      const plot = make(Math.max(260, holder.clientWidth));
      holder.replaceChildren(plot.root);
      return plot;
    });
  }

  private block(title: string, said: string, make: (width: number) => uPlot, ...tools: HTMLElement[]): HTMLElement {
    const holder = h("div", { class: "plot", role: "img", "aria-label": said });
    this.holders.push({ holder, make });
    return h("div", { class: "plot-block" }, h("h3", {}, title), ...tools, holder, h("p", { class: "quiet" }, said));
  }

  // group: of many plots those with the same axes, which have one scale, so that they can be compared at a glance.
  private lines(one: Series, width: number, group: Series[]): uPlot {
    const stemmed = one.kind === "stems";
    const say = words(one.y_unit), sayX = words(one.x_unit);
    const isSmall = group.length > 0;
    const scale = (log: boolean, values: (series: Series) => (number | null)[]): uPlot.Scale => ({
      time: false, ...(log ? { distr: 3 as const, log: 10 as const } : {}), ...(group.length > 1 ? common(group.flatMap(values), log) : {}),
    });
    const made = new uPlot({
      width, height: isSmall ? SMALL : HEIGHT,
      scales: { x: scale(one.log_x, (series) => series.xs), y: scale(one.log, (series) => series.lines.flatMap(([, values]) => values)) },
      axes: [axis(one.x, one.x_unit), { ...axis(one.y, one.y_unit), size: 64 }],
      series: [
        { label: one.x, value: (_: uPlot, v: number | null) => (v === null ? "" : sayX(v)) },
        ...one.lines.map(([label], i) => ({
          label, stroke: lineColour(label, i), width: label === "local" ? 0 : 1.5,
          points: { show: stemmed || one.xs.length <= MOST_POINTS || label === "local", size: 6, fill: lineColour(label, i) },
          spanGaps: !stemmed, ...(stemmed ? { paths: stems } : {}),
          value: (_: uPlot, v: number | null, __: number, i: number | null) => (i === null ? "" : v === null ? (stemmed ? "-" : say(0)) : say(v)),
        })),
      ],
      hooks: { draw: [(plot) => drawMarks(plot, one.marks)] },
    }, [one.xs, ...one.lines.map(([, values]) => values)] as uPlot.AlignedData);
    if (one.nodes.length > 0) {
      made.over.title = "A click shows the call in the graph";
      made.over.addEventListener("click", () => {
        const call = this.model.calls[one.nodes[made.cursor.idx ?? -1] ?? -1];
        if (call) this.reveal(call);
      });
    }
    return made;
  }

  private histograms(): HTMLElement {
    const rows = this.model.page.exponents;
    rows.forEach((row, i) => this.chosen.append(h("option", { value: i }, `${identity(this.model.calls[row.node]!)}, ${row.name}`)));
    on(this.chosen, { change: () => this.draw() });
    const said = "How often each power of two occurs among the values that are not zero; above, which of them each format holds (thin: with fewer digits).";
    return this.block("Exponents", said, (width) => exponents(rows[Number(this.chosen.value) || 0]!, this.model, width), this.chosen);
  }
}

const axesOf = (one: Series): string => JSON.stringify([one.x, one.y, one.x_unit, one.y_unit, one.log, one.log_x, one.kind, one.nodes.length > 0]);

// The scale that has room for all of these: powers of ten, or a little more than they need.
function common(values: (number | null)[], log: boolean): uPlot.Scale {
  const known = values.filter((v): v is number => v !== null && (!log || v > 0));
  const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(low < high)) return {};
  const range: [number, number] = log ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))] : [low, high + (high - low) / 20];
  return { auto: false, range };
}

function describe(one: Series): string {
  const known = one.lines.flatMap(([, values]) => values).filter((v): v is number => v !== null);
  const most = known.length > 0 ? words(one.y_unit)(known.reduce((a, b) => Math.max(a, b))) : "none";
  const parts = [`${one.lines.map(([name]) => name).join(", ")} over ${one.xs.length} points; the largest is ${most}.`, one.note];
  if (one.marks.length > 0) parts.push(`Lines cross where ${one.marks.map(([, , said]) => said).join("; ")}.`);
  if (one.nodes.length > 0) parts.push("A click shows the call in the graph.");
  return parts.filter(Boolean).join(" ");
}

function exponents(row: Exponents, model: Model, width: number): uPlot {
  const ranges = RANGES.filter((name) => model.page.formats[name]);
  const low = Math.min(row.first, -26) - 1, high = Math.max(row.first + row.counts.length, 17) + 1;
  const xs = Array.from({ length: high - low + 1 }, (_, i) => low + i);
  const total = row.counts.reduce((a, b) => a + b, 0) || 1;
  const ys = xs.map((x) => { const n = row.counts[x - row.first]; return n ? n / total : null; });
  const top = 16 * ranges.length + 8;
  const bars = uPlot.paths.bars!({ size: [0.86, 40] });
  return new uPlot({
    width, height: HEIGHT + top, padding: [top, 8, 0, 0], legend: { show: true }, scales: { x: { time: false, range: [low, high] }, y: { range: (_, __, max) => [0, max || 1] } },
    axes: [{ ...axis("exponent e: values from 2^e to 2^(e+1)"), incrs: [1, 2, 4, 8, 16, 32] }, axis("share of values")],
    series: [{ label: "exponent" }, { label: `share, ${row.format}`, stroke: colour("--line1"), fill: colour("--line1"), paths: bars, points: { show: false }, value: (_, v) => (v === null ? "" : `${(100 * v).toFixed(1)} %`) }],
    hooks: { draw: [(plot) => drawRanges(plot, ranges, model, low, high)] },
  }, [xs, ys]);
}

function drawRanges(plot: uPlot, names: string[], model: Model, low: number, high: number): void {
  const { ctx } = plot;
  const ratio = uPlot.pxRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  names.forEach((name, i) => {
    const range = model.page.formats[name]!;
    const y = (8 + 16 * i) * ratio;
    const at = (e: number) => plot.valToPos(Math.max(low, Math.min(high, e)), "x", true);
    ctx.strokeStyle = ctx.fillStyle = colour(`--${/^e/.test(name) ? "fp8" : name}`);
    for (const [from, to, thick] of [[range.smallest, range.normal, 2], [range.normal, range.largest + 1, 6]] as const) {
      if (to <= low) continue;
      ctx.lineWidth = thick * ratio;
      ctx.beginPath();
      ctx.moveTo(at(from), y);
      ctx.lineTo(at(to), y);
      ctx.stroke();
    }
    ctx.textAlign = "right";
    ctx.fillStyle = colour("--text");
    ctx.fillText(name, plot.bbox.left - 6 * ratio, y);
  });
  ctx.restore();
}
