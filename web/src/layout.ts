// Where boxes and links lie: dagre, for one opened module, around those that are open in it.
import { Graph, layout } from "@dagrejs/dagre";
import type { Model } from "./data";
import { LABEL, shapeOf, titleOf } from "./draw";
import type { Box, Link, View } from "./tree";

export interface Placed { box: Box; x: number; y: number; width: number; height: number }
export interface Path { link: Link; points: { x: number; y: number }[]; label: { x: number; y: number } }
export interface Layout { boxes: Placed[]; groups: Placed[]; paths: Path[]; width: number; height: number }

const LETTER = 7.9;

function sizeOf(model: Model, box: Box, more: number): { width: number; height: number } {
  const letters = Math.min(30, Math.max(titleOf(model, box).length, box.kind === "source" || box.kind === "outside" ? 8 : more > 0 ? 21 : 17));
  const width = Math.round(letters * LETTER + 26);
  return { width, height: box.kind === "source" || box.kind === "outside" ? 26 : (box.kind === "call" ? 48 : 62) + more };
}

// more: how much higher boxes are than names and formats make them.
export function place(model: Model, view: View, labelled: (link: Link) => boolean, more = 0): Layout {
  const graph = new Graph({ multigraph: false, compound: true });
  graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 34, marginx: 16, marginy: 16 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const box of view.boxes) graph.setNode(box.key, sizeOf(model, box, more));
  for (const group of view.groups) graph.setNode(group.key, {});
  for (const box of [...view.groups, ...view.boxes]) if (box.around !== undefined) graph.setParent(box.key, box.around);
  for (const link of view.links)
    graph.setEdge(link.from, link.to, labelled(link) ? { width: LABEL, height: 18, labelpos: "c" }
      : { width: 12 * shapeOf(link).length, height: shapeOf(link) ? 12 : 0, labelpos: "c" });
  layout(graph);
  const placed = (box: Box): Placed => {
    const { x, y, width, height } = graph.node(box.key) as { x: number; y: number; width: number; height: number };
    return { box, x, y, width, height };
  };
  const boxes = view.boxes.map(placed), groups = view.groups.map(placed);
  const paths = view.links.map((link) => {
    const edge = graph.edge(link.from, link.to) as { points: { x: number; y: number }[]; x?: number; y?: number };
    const middle = edge.points[Math.floor(edge.points.length / 2)]!;
    return { link, points: edge.points, label: { x: edge.x ?? middle.x, y: edge.y ?? middle.y } };
  });
  const { width, height } = graph.graph() as { width: number; height: number };
  return { boxes, groups, paths, width, height };
}
