// Which part of the drawing is seen: dragged, zoomed, fitted.
export class Camera {
  private x = 0;
  private y = 0;
  private scale = 1;

  constructor(
    private readonly svg: SVGSVGElement, private readonly width: number, private readonly height: number,
    private readonly moved: () => void = () => {},
  ) {
    let from: { x: number; y: number } | null = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && !(event.target as Element).closest(".box")) from = { x: event.clientX, y: event.clientY };
    });
    svg.addEventListener("pointermove", (event) => {
      if (!from) return;
      this.move((from.x - event.clientX) / this.scale, (from.y - event.clientY) / this.scale);
      from = { x: event.clientX, y: event.clientY };
    });
    for (const name of ["pointerup", "pointerleave"]) svg.addEventListener(name, () => { from = null; });
    svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY < 0 ? 1.12 : 1 / 1.12);
      else this.move(event.deltaX / this.scale, event.deltaY / this.scale);
    }, { passive: false });
  }

  private seen(): { width: number; height: number } {
    const { width, height } = this.svg.getBoundingClientRect();
    return { width: (width || 900) / this.scale, height: (height || 600) / this.scale };
  }

  private apply(): void {
    const { width, height } = this.seen();
    this.svg.setAttribute("viewBox", `${this.x} ${this.y} ${width} ${height}`);
    this.moved();
  }

  // The part of the drawing that is seen.
  window(): { x: number; y: number; width: number; height: number } {
    return { x: this.x, y: this.y, ...this.seen() };
  }

  centre(x: number, y: number): void {
    const { width, height } = this.seen();
    this.move(x - width / 2 - this.x, y - height / 2 - this.y);
  }

  // All of it, unless that would be too small to read: then the top.
  fit(): void {
    const { width, height } = this.svg.getBoundingClientRect();
    const whole = Math.min((width || 900) / this.width, (height || 600) / this.height, 1.25);
    this.scale = Math.max(whole, 0.72);
    const seen = this.seen();
    this.x = (this.width - seen.width) / 2;
    this.y = this.height < seen.height ? (this.height - seen.height) / 2 : 0;
    this.apply();
  }

  move(dx: number, dy: number): void {
    this.x += dx;
    this.y += dy;
    this.apply();
  }

  zoom(by: number): void {
    const before = this.seen();
    this.scale = Math.max(0.1, Math.min(4, this.scale * by));
    const after = this.seen();
    this.move((before.width - after.width) / 2, (before.height - after.height) / 2);
  }

  // Move no further than is needed for this to be seen.
  show(x: number, y: number, width: number, height: number): void {
    const seen = this.seen();
    const shift = (at: number, size: number, from: number, room: number) =>
      at - size / 2 < from + 12 ? at - size / 2 - from - 12 : at + size / 2 > from + room - 12 ? at + size / 2 - from - room + 12 : 0;
    this.move(shift(x, width, this.x, seen.width), shift(y, height, this.y, seen.height));
  }
}
