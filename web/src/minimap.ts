// A small picture of the opened module, with the part of it that is seen: a click or a drag moves there.
import type { Camera } from "./camera";
import { s } from "./dom";
import type { Layout } from "./layout";

const WIDTH = 150, HEIGHT = 170, LEAST = 36;

export class Minimap {
  readonly element: SVGSVGElement;
  private readonly seen = s("rect", { class: "seen" });

  constructor(private readonly layout: Layout) {
    const { width, height, boxes } = layout;
    const scale = Math.min(WIDTH / width, HEIGHT / height);
    this.element = s("svg", {
      class: "minimap", role: "img", "aria-label": "Which part of this module is seen; w a s d move it",
      viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none",
      width: Math.max(LEAST, Math.round(width * scale)), height: Math.max(LEAST, Math.round(height * scale)),
    }, ...boxes.map((placed) =>
      s("rect", { class: "spot", x: placed.x - placed.width / 2, y: placed.y - placed.height / 2, width: placed.width, height: placed.height })), this.seen);
  }

  // Where the camera looks now; all in view needs no map.
  update(camera: Camera): void {
    const { x, y, width, height } = camera.window();
    const all = x <= 1 && y <= 1 && x + width >= this.layout.width - 1 && y + height >= this.layout.height - 1;
    this.element.toggleAttribute("hidden", all);
    const left = Math.max(0, x), top = Math.max(0, y);
    this.seen.setAttribute("x", String(left));
    this.seen.setAttribute("y", String(top));
    this.seen.setAttribute("width", String(Math.max(0, Math.min(this.layout.width, x + width) - left)));
    this.seen.setAttribute("height", String(Math.max(0, Math.min(this.layout.height, y + height) - top)));
  }

  follow(camera: Camera): void {
    let held = false;
    const go = (event: PointerEvent) => {
      const at = this.element.getBoundingClientRect();
      camera.centre(((event.clientX - at.x) / at.width) * this.layout.width, ((event.clientY - at.y) / at.height) * this.layout.height);
    };
    this.element.addEventListener("pointerdown", (event) => {
      held = true;
      this.element.setPointerCapture(event.pointerId);
      go(event);
    });
    this.element.addEventListener("pointermove", (event) => { if (held) go(event); });
    for (const name of ["pointerup", "pointercancel"]) this.element.addEventListener(name, () => { held = false; });
  }
}
