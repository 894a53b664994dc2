// Bundles src/ into the two files that the wheel has, with the licences of what is bundled, and the digest of the
// sources, by which a test knows whether they are what the sources give.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../src/narrowcast/reports/render/built");
const bundled = ["uplot", "@dagrejs/dagre", "@dagrejs/graphlib"];

// The same in tests/pure/test_page.py: names and contents, in the order of the names.
const files = readdirSync(join(here, "src")).map((name) => `src/${name}`);
const sources = [...files, "build.mjs", "package-lock.json", "package.json", "tsconfig.json"].sort();
const hash = createHash("sha256");
for (const name of sources) hash.update(`${name}\n`).update(readFileSync(join(here, name)));
const digest = hash.digest("hex");

const licences = bundled.map((name) => {
  const folder = join(here, "node_modules", name);
  const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  return `${name} ${version}\n\n${readFileSync(join(folder, "LICENSE"), "utf8").trim()}`;
});
const banner = (of) => `/*! ${of} of Narrowcast, Apache-2.0; built by \`make page\` from web/\nsources ${digest}\n*/`;
const thanks = `/*!\nBundled:\n\n${licences.join("\n\n")}\n*/`;

for (const [entry, file, head] of [
  ["src/main.ts", "page.js", `${banner("The page")}\n${thanks}`],
  ["src/style.css", "page.css", banner("The page's style")],
]) {
  const made = await build({
    entryPoints: [join(here, entry)], bundle: true, minify: true, format: "iife", target: "es2022", charset: "utf8",
    legalComments: "none", write: false, logLevel: "warning",
  });
  // An HTML parser ends a script at this text, whatever is around it.
  const text = made.outputFiles[0].text.replaceAll("</script", "<\\/script").replaceAll("</style", "<\\/style");
  writeFileSync(join(out, file), `${head}\n${text}`);
}
