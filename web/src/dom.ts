// Elements. Text is only ever set as text, so nothing of a user's becomes markup.

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | undefined>;
type Handlers = Partial<{ [K in keyof HTMLElementEventMap]: (event: HTMLElementEventMap[K]) => void }>;

function fill<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((c): c is Node | string => c !== null && c !== undefined && c !== false));
  return element;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

export function s<K extends keyof SVGElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export function on<E extends HTMLElement>(element: E, handlers: Handlers): E {
  for (const [name, handler] of Object.entries(handlers)) element.addEventListener(name, handler as EventListener);
  return element;
}

export function button(text: string, press: () => void, attributes: Attributes = {}): HTMLButtonElement {
  return on(h("button", { type: "button", ...attributes }, text), { click: press });
}

const live = h("div", { class: "said", role: "status", "aria-live": "polite" });
let silence = 0;

export function say(text: string): void {
  if (!live.isConnected) document.body.append(live);
  live.textContent = text;
  window.clearTimeout(silence);
  silence = window.setTimeout(() => { live.textContent = ""; }, 2500);
}

export async function copy(text: string, what: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say(`Copied ${what}`);
}

export function save(text: string, name: string, type = "text/csv"): void {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
  say(`Saved ${name}`);
}
