"""The page in a headless Chromium: drawn, clicked, and used with keys alone; skipped where no browser is."""

import json
import time

import pytest
from page_results import SCRIPT, a_comparison, a_ledger, a_run, all_results, differences, explained

from narrowcast.reports.documents.model import Column, Document, Edge, Graph, Node, Series, Table
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.render.html import page_html

RESULTS = all_results()


def drawn(browser, kind=""):
    return browser.value(f"[...document.querySelectorAll('.box{kind}')].map(b => b.getAttribute('aria-label'))")


def crumbs(browser):
    return browser.value("document.querySelector('.crumbs').textContent").split(" › ")


@pytest.mark.parametrize("name", RESULTS)
def test_each_page_is_drawn_without_an_error(show, name):
    """And nothing of a user's becomes an element."""
    page = show(RESULTS[name])
    assert page.value("document.querySelector('.verdict').textContent.length") > 5
    assert (
        page.value("document.querySelectorAll('#page script, #page b:not(.chip):not(.casts b), #page img').length") == 0
    )


def test_a_module_named_like_markup_is_shown_by_its_name(show):
    """In the graph, in tables and in what is worth doing."""
    page = show(a_ledger())
    assert any(SCRIPT in label for label in drawn(page))
    assert SCRIPT in page.value("document.querySelector('.todos').textContent")


def test_no_script_but_the_page_s_own_runs_there(show, browser):
    """The policy in the page refuses one that is put into it."""
    text = a_ledger().to_html().replace("</body>", "<script>document.title = 'taken'</script></body>")
    show(text)
    assert browser.value("document.title") != "taken"
    assert any("Content Security Policy" in error for error in browser.errors)
    browser.errors.clear()


def test_every_control_can_be_clicked(show):
    """Each button, each choice of each select, each tab with its columns; nothing breaks."""
    page = show(explained(comparison=a_comparison()))
    clicked = page.value(
        """(() => {
          let n = 0;
          const shown = (e) => e.isConnected && !e.disabled && e.offsetParent !== null;
          for (const tab of document.querySelectorAll('[role=tab]')) {
            tab.click(); n++;
            const inside = document.querySelectorAll('#tables .table-body button');
            for (const b of [...inside]) if (shown(b)) { b.click(); n++; }
          }
          for (const select of document.querySelectorAll('select'))
            for (const option of [...select.options]) {
              select.value = option.value; select.dispatchEvent(new Event('change')); n++;
            }
          for (const filter of document.querySelectorAll('#filter'))
            { filter.value = 'all'; filter.dispatchEvent(new Event('change')); }
          for (const box of [...document.querySelectorAll('.box')])
            { box.dispatchEvent(new MouseEvent('click', {bubbles: true})); n++; }
          for (const b of [...document.querySelectorAll('button')]) if (shown(b)) { b.click(); n++; }
          return n;
        })()"""
    )
    assert clicked > 60


CONTRASTS = """(() => {
  const light = (rgb) => rgb.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  for (const name of ["fp64", "fp32", "bf16", "fp16", "fp8", "mixed", "other"]) {
    const part = document.createElement("div");
    part.className = `part ${name}`;
    document.body.append(part);
    const style = getComputedStyle(part);
    const [a, b] = [style.color, style.backgroundColor].map(light).sort((x, y) => y - x);
    found[name] = (a + 0.05) / (b + 0.05);
    part.remove();
  }
  return found;
})()"""


def test_labels_on_colours_can_be_read(show):
    """WCAG asks for a contrast of 4.5, in the light and in the dark."""
    page = show(a_ledger())
    for clicks in (1, 1):  # light, then dark
        page.click("#theme", times=clicks)
        contrasts = page.value(CONTRASTS)
        assert len(contrasts) == 7 and min(contrasts.values()) >= 4.5, contrasts


def test_a_label_that_does_not_fit_is_not_cut(show):
    """`bf16 23 %` is shown whole or not at all."""
    page = show(a_ledger(), width=390)
    cut = """[...document.querySelectorAll('.part span')].filter((s) => {
      const outer = s.parentElement.getBoundingClientRect(), inner = s.getBoundingClientRect();
      return inner.top < outer.bottom && (inner.left < outer.left - 0.5 || inner.right > outer.right + 0.5);
    }).map((s) => s.textContent)"""
    assert page.value(cut) == []


def test_alike_layers_are_folded_and_open(show):
    """A few layers stand there from the start, many as `encoder.layer.* × 12`; Unfold shows each."""
    page = show(a_ledger())
    assert [label.split(",")[0] for label in drawn(page, ".module")] == [f"encoder.layer.{n}" for n in range(3)]
    page = show(a_ledger(layers=12))
    assert [label.split(",")[0] for label in drawn(page, ".fold")] == ["encoder.layer.* × 12"]
    page.click(".box.fold .body")
    assert "do the same" in page.value("document.querySelector('.detail').textContent")
    page.click(".detail .actions button:nth-child(2)")
    assert [label.split(",")[0] for label in drawn(page, ".module")] == [f"encoder.layer.{n}" for n in range(12)]
    page.click(".box.module .body", times=2)
    assert crumbs(page)[1:] == ["encoder", "layer", "0"]


def test_a_link_says_which_shape_it_carries(show):
    """One between two calls, where they give each other values of one shape; a cast has its formats there, and all of
    it is in words where the pointer rests.
    """
    nodes = [Node(f"layer.{n}", "aten.linear.default", "#1", computes="bf16") for n in range(3)]
    edges = [
        Edge(0, 1, "input", "bf16", "bf16", 4096, shape="[2, 16, 64]"),
        Edge(1, 2, "input", "fp32", "bf16", 6144, how="copied", shape="[2, 16, 64]"),
        Edge(0, 2, "input", "bf16", "bf16", 64, shape="[2, 16]"),
        Edge(0, 2, "other", "bf16", "bf16", 64, shape="[16]"),
    ]
    page = show(page_html(Document("run", "A run", "It ran", graph=Graph(nodes, edges, flow=True))))
    texts = page.value("[...document.querySelectorAll('.link text')].map((t) => t.textContent)")
    assert sorted(texts) == ["[2, 16, 64]", "fp32 → bf16 6.0 KiB"]
    words = page.value("[...document.querySelectorAll('.link title')].map((t) => t.textContent)")
    said = ["bf16 [2, 16, 64]\n4.0 KiB", "bf16 [2, 16]\nbf16 [16]\n128 B", "fp32 → bf16 [2, 16, 64]\n6.0 KiB"]
    assert sorted(words) == said


def test_layers_that_differ_are_not_folded(show):
    """A fold that hid a difference would be a lie."""
    ledger = a_ledger()
    kind = next(k for k in ledger.calls if k.module_path == "encoder.layer.1.dense")
    calls = {(type(k)(**{**_fields(k), "computes": "fp32"}) if k is kind else k): t for k, t in ledger.calls.items()}
    ledger.calls = calls
    assert drawn(show(ledger), ".fold") == []


def _fields(record):
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_the_page_is_used_with_keys_alone(show):
    """To the graph with Tab, to a layer and its call with arrows, in with Enter, out with Backspace, found with /."""
    page = show(a_ledger())
    for _ in range(40):
        page.press("Tab")
        if page.value("document.activeElement.className") == "stage":
            break
    assert page.value("document.activeElement.className") == "stage"
    page.press("ArrowDown", "Enter")
    assert crumbs(page)[1:] == ["encoder", "layer", "0"]
    page.press("ArrowDown", "ArrowDown")
    detail = page.value("document.querySelector('.detail').textContent")
    assert "softmax.int" in detail and 'action = "lower"' in detail and "sums" in detail and FILE_LINE in detail
    page.press("Backspace")
    assert len(crumbs(page)) == 1
    page.press("/", *"layer.2 add", "Enter")
    assert "add.Tensor" in page.value("document.querySelector('.detail').textContent")
    assert crumbs(page)[1:] == ["encoder", "layer", "2"]


FILE_LINE = "/home/me/<b>model</b>.py:7"


def test_findings_are_gone_through_wherever_the_graph_is(show):
    """n and p, and the buttons."""
    page = show(differences())
    page.value("document.querySelector('.stage').focus()")
    page.press("n")
    assert "beyond its band" in page.value("document.querySelector('.detail').textContent")
    page.press("Backspace", "p")
    assert "beyond its band" in page.value("document.querySelector('.finding').textContent")


def test_filters_hide_calls(show):
    """Only with casts: not the sums."""
    page = show(a_ledger())
    choose = "const s = document.querySelector('#filter'); s.value = '{}'; s.dispatchEvent(new Event('change'))"
    page.value(f"{{ {choose.format('leaks')} }}")
    assert all("3 calls" in label for label in drawn(page, ".fold"))
    page.value(f"{{ {choose.format('backward')} }}")
    assert drawn(page) == [] and "No call here" in page.value("document.querySelector('.stage').textContent")


def test_tables_are_sorted_filtered_and_copied(show):
    """By numbers as numbers; CSV has what is shown."""
    page = show(a_ledger())
    page.value("document.querySelector('[data-table=casts]').click()")
    column = "[...document.querySelectorAll('#tables tbody tr')].map(r => r.children[{}].textContent)"
    page.value("[...document.querySelectorAll('#tables th button')].find(b => b.textContent === 'bytes').click()")
    assert page.value(column.format(9))[:3] == ["4.9 KiB"] * 3
    page.value("[...document.querySelectorAll('#tables th button')].find(b => b.textContent === 'bytes').click()")
    assert page.value(column.format(9))[:3] == ["600 B"] * 3
    page.value(
        "{ const f = document.querySelector('.filter'); f.value = 'softmax'; f.dispatchEvent(new Event('input')) }"
    )
    assert page.value(column.format(1)) == ["softmax.int"] * 3
    page.value("window.taken = ''; navigator.clipboard.writeText = async (text) => { window.taken = text }")
    for name, said in (("CSV", "encoder.layer.0,aten.softmax.int,self"), ("TOML", 'action = "follow"')):
        page.value(
            f"[...document.querySelectorAll('#tables button')].find(b => b.textContent.includes('{name}')).click()"
        )
        assert said in page.value("window.taken") and "linear" not in page.value("window.taken")


def test_casts_lie_on_edges_and_wider_ones_are_thicker(show):
    """Of a run: from the tensor that came to the call that reads it in another format."""
    page = show(a_run())
    page.value("document.querySelector('.stage').focus()")
    page.press("ArrowDown", "Enter")
    assert crumbs(page)[1:] == ["layer", "0"]
    assert page.value("document.querySelectorAll('.link.cast').length") == 2
    widths = json.loads(
        page.value(
            "JSON.stringify([...document.querySelectorAll('.link path')].map(p => +p.getAttribute('stroke-width')))"
        )
    )
    assert max(widths) > 1


@pytest.mark.parametrize("window", [{"scale": 4}, {"dark": True}, {"width": 700}])
def test_nothing_is_cut_off_sideways(show, window):
    """At 400 % zoom, in the dark, in a narrow window: the page scrolls down only."""
    for name in ("compared", "run", "differences"):
        page = show(RESULTS[name], **window)
        assert page.value("document.documentElement.scrollWidth <= innerWidth"), name


def test_the_overview_fits_one_screen(show):
    """Of a comparison, with three things to do, in a window of 1400 by 900."""
    page = show(RESULTS["compared"])
    assert page.value("document.querySelector('#overview').getBoundingClientRect().bottom") < 900


def many(layers):
    """As many calls as a large model has forward and backward, some alike and some not."""
    nodes, edges = [], []
    for n in range(layers):
        for m in range(170):
            computes = "bf16" if (m + n % 3) % 5 else "fp32"
            nodes.append(
                Node(
                    f"blocks.{n}.part{m % 9}.inner{m % 4}",
                    "aten.linear.default",
                    f"#{m}",
                    computes=computes,
                    bytes=m * n,
                )
            )
            if len(nodes) > 1:
                edges.append(Edge(len(nodes) - 2, len(nodes) - 1, "input", "fp32", computes, 1000 * m))
    return Document("run", "A large run", "It is large", graph=Graph(nodes, edges, flow=True))


def test_a_model_of_eight_thousand_calls_is_opened_module_by_module(show):
    """Some boxes at a time, and a page of less than 5 MB."""
    text = page_html(many(48))
    assert len(text.encode()) < 5_000_000
    page = show(text)
    assert len(page.value("document.querySelector('#data').textContent")) > 100_000
    assert 0 < len(drawn(page)) <= 60
    started = time.monotonic()
    page.value("document.querySelector('.stage').focus()")
    page.press("ArrowDown", "Enter")
    assert len(crumbs(page)) > 1 and 0 < len(drawn(page)) <= 60
    assert time.monotonic() - started < 30  # it does not hang; how long it takes is measured elsewhere


def test_a_broken_page_is_noticed(show, browser):
    """What the tests above look at has the error of a page whose data lacks a part."""
    data = document_of(a_ledger()).data()
    del data["graph"]["texts"]
    whole = a_ledger().to_html()
    start, end = whole.index('id="data">') + 10, whole.index("</script>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("browser.SECONDS", 1)
        with pytest.raises(TimeoutError):
            show(whole[:start] + json.dumps(data).replace("<", "\\u003c") + whole[end:])
    assert any("TypeError" in error for error in browser.errors)
    browser.errors.clear()


def test_the_run_is_a_strip_in_the_colours_of_the_graph(show):
    """A part for each call in their order; by error it has other colours; a click shows the call in the graph."""
    nodes = [
        Node(f"layer.{n}", "aten.mm.default", computes="bf16" if n % 2 else "fp32", local=10.0**-n) for n in range(9)
    ]
    page = show(page_html(Document("ledger", "m", "v", graph=Graph(nodes, []))))
    strip = "document.querySelector('.strip')"
    classes = f"[...{strip}.querySelectorAll('rect')].map(r => r.getAttribute('class'))"
    assert page.value(classes) == ["fp32", "bf16"] * 4 + ["fp32"]
    page.value("document.getElementById('by').value = 'error'")
    page.value("document.getElementById('by').dispatchEvent(new Event('change'))")
    heats = page.value(classes)
    assert heats[0] == "heat6" and heats[-1] == "heat0" and heats == sorted(heats, reverse=True)
    page.value(f"{strip}.querySelectorAll('rect')[4].dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert "layer.4" in page.value("document.querySelector('.side').textContent")


def test_paper_has_every_row_of_every_table_in_dark_ink(show, browser):
    """Tabs and buttons cannot be pressed there; also where the dark scheme was chosen by hand."""
    ledger = a_ledger()
    page = show(ledger)
    page.click("#theme")
    page.click("#theme")
    rows = sum(len(table.rows) for table in document_of(ledger).tables)
    assert page.value("document.querySelectorAll('tbody tr').length") < rows
    browser.ask("Emulation.setEmulatedMedia", media="print")
    page.value("dispatchEvent(new Event('beforeprint')), 1")
    visible = "[...document.querySelectorAll('tbody tr')].filter((row) => row.offsetParent !== null).length"
    assert page.value(visible) == rows
    assert page.value("getComputedStyle(document.documentElement).getPropertyValue('--good').trim()") == "#1a7437"
    browser.ask("Emulation.setEmulatedMedia", media="")
    page.value("dispatchEvent(new Event('afterprint')), 1")
    assert page.value("document.querySelectorAll('.paper tr').length") == 0


def test_paper_has_every_column_of_a_wide_table(show, browser):
    """Chromium scales what is wider than the paper, a letter, by 1.5 at most; the rest is cut."""
    path, file = "encoder.layers.1.attention.projection", "modeling_of_many_things.py:1234"
    kinds = ["call", "call_b", "module", "op", *["format"] * 2, *["error"] * 6, "line", "line"]
    values = [f"{path} aten.linear.default #1"] * 2 + [path, "aten.linear.default", "fp32", "bf16", *[1e-3] * 6]
    columns = tuple(Column(f"column of {kind}", kind) for kind in kinds)
    wide = Table("wide", "A wide table", columns, [[*values, file, file]])
    page = show(page_html(Document("ledger", "m", "v", tables=[wide])))
    browser.ask("Emulation.setEmulatedMedia", media="print")
    browser.ask("Emulation.setDeviceMetricsOverride", width=740, height=1000, deviceScaleFactor=1, mobile=False)
    page.value("dispatchEvent(new Event('beforeprint')), 1")
    assert 600 < page.value("document.querySelector('.paper table').scrollWidth") <= 1.5 * 740
    assert page.value("document.documentElement.scrollWidth") <= 1.5 * 740
    browser.ask("Emulation.setEmulatedMedia", media="")
    browser.ask("Emulation.clearDeviceMetricsOverride")


SUBTITLES = """(() => {
  const linear = (v) => v <= 0.03928 * 255 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    for (const each of ["#fff", colour]) { canvas.fillStyle = each; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const box = document.querySelector(".box:not(.module)"), found = [];
  const parts = [box.querySelector(".body"), box.querySelector("text.sub, text.small")];
  for (let n = 0; n < 7; n++) {
    box.classList.add(`heat${n}`);
    const [a, b] = parts.map((part) => luminance(rgb(getComputedStyle(part).fill))).sort((x, y) => y - x);
    found.push((a + 0.05) / (b + 0.05));
    box.classList.remove(`heat${n}`);
  }
  return found;
})()"""


def test_subtitles_on_the_colours_of_errors_can_be_read(show):
    """Of all seven, in the light and in the dark."""
    page = show(a_ledger())
    for _ in range(2):
        page.click("#theme")
        contrasts = page.value(SUBTITLES)
        assert len(contrasts) == 7 and min(contrasts) >= 4.5, contrasts


def test_a_module_opens_in_its_place(show):
    """Its calls stand among what is around it, in a frame with its name; a link ends at the call that it is for."""
    nodes = [Node(path, "aten.linear.default", "#1", computes="bf16") for path in ("a.x", "a.y", "b.x", "b.y")]
    edges = [Edge(n, n + 1, "input", "bf16", "bf16", 64) for n in range(3)]
    page = show(page_html(Document("run", "A run", "It ran", graph=Graph(nodes, edges, flow=True))))
    assert [label.split(",")[0] for label in drawn(page, ".module")] == ["a", "b"]
    page.click(".box.module .body")
    for word in ("Open here", "Close here"):
        (at,) = [n for n, text in enumerate(words(page, ".detail .actions button")) if text == word]
        page.click(f".detail .actions button:nth-child({at + 1})")
        if word == "Open here":
            assert drawn(page, ".group") == ["a, a module, open here"]
            assert [label.split(",")[0] for label in drawn(page, ".box.call")] == ["x: linear", "y: linear"]
            assert crumbs(page) == crumbs(page)[:1] and len(page.value(LINKS)) == 2  # one ends at `b`
            frame, *inside = page.value(
                "[...document.querySelectorAll('.box.group .body, .box.call .body')]"
                ".map((b) => b.getBoundingClientRect().toJSON())"
            )
            for box in inside:
                assert frame["top"] < box["top"] and box["bottom"] < frame["bottom"], (frame, box)
                assert frame["left"] < box["left"] and box["right"] < frame["right"], (frame, box)
    assert drawn(page, ".group") == [] and [label.split(",")[0] for label in drawn(page, ".module")] == ["a", "b"]


def test_several_modules_are_open_one_in_another_and_closed_with_a_key(show):
    """`i` opens what is selected, and of a call closes what it stands in."""
    nodes = [
        Node(path, "aten.linear.default", "#1", computes="bf16") for path in ("a.x.p", "a.x.q", "a.y", "b.x", "b.y")
    ]
    edges = [Edge(n, n + 1, "input", "bf16", "bf16", 64) for n in range(4)]
    page = show(page_html(Document("run", "A run", "It ran", graph=Graph(nodes, edges, flow=True))))
    for title in ("a", "x", "b"):
        (key,) = [key for key, label in boxes(page) if label.split(",")[0] == title and "open here" not in label]
        page.click(f'.box[data-key="{key}"] .body')
        page.press("i")
    assert sorted(drawn(page, ".group")) == [f"{name}, a module, open here" for name in ("a", "b", "x")]
    assert len(drawn(page, ".box.call")) == 5 and len(page.value(LINKS)) == 4
    page.click('.box[data-key="call 0"] .body')
    page.press("i")
    assert sorted(drawn(page, ".group")) == ["a, a module, open here", "b, a module, open here"]
    page.press("/", *"p linear", "Enter")  # what is shown inside of a closed one is found in its module
    assert len(drawn(page, ".box.selected")) == 1


def boxes(page):
    return page.value(
        "[...document.querySelectorAll('.box')].map((b) => [b.getAttribute('data-key'), b.getAttribute('aria-label')])"
    )


LINKS = "[...document.querySelectorAll('.link path')].map((p) => p.getAttribute('d'))"


def words(page, selector):
    return page.value(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")


def test_many_plots_are_small_and_have_one_scale_where_their_axes_are_alike(show):
    """Beside each other on a wide window, below each other on a narrow one; the same ticks on alike axes."""
    near = [
        Series(
            f"plot {n}",
            "size",
            "time",
            [1.0, 100.0],
            [("fp32", [10.0**n, 10.0 ** (n + 1)])],
            "whole",
            "ns",
            log=True,
            log_x=True,
        )
        for n in range(3)
    ]
    other = Series("another", "step", "scale", [1.0, 2.0], [("scale", [1.0, 8.0])], "whole")
    made = page_html(Document("profile", "A device", "It is measured", series=[*near, other]))
    page = show(made, width=1400)
    lefts = "[...document.querySelectorAll('.plot')].map((p) => Math.round(p.getBoundingClientRect().left))"
    assert len(set(page.value(lefts))) > 2
    ticks = ticks_of(page)
    assert len(ticks) == 4 and ticks[0] == ticks[1] == ticks[2] != ticks[3]
    assert {"1 ns", "1 µs"} <= set(ticks[0]), ticks[0]
    assert len(set(show(made, width=390).value(lefts))) == 1


def ticks_of(page):
    """What each plot writes at its axes: `fillText` of a canvas is listened to while they are drawn again."""
    return page.value(
        "(() => { const said = new Map(), write = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
        " if (!said.has(this.canvas)) said.set(this.canvas, []); said.get(this.canvas).push(text);"
        " return write.call(this, text, ...at); };"
        "window.dispatchEvent(new Event('resize'));"
        "return new Promise((done) => setTimeout(() => { CanvasRenderingContext2D.prototype.fillText = write;"
        " done([...said.values()]); }, 200)); })()"
    )


def test_ticks_are_in_the_unit_of_their_axis_and_none_is_there_twice(show):
    """Bytes, times, errors, whole steps: each as figures are, with nothing like 0 0 0 0."""
    lines = {"bytes": [2e3, 4e6], "ns": [1.5e3, 9e6], "relative": [1e-6, 1e-2], "percent": [1.0, 99.0]}
    series = [
        Series(unit, "step", unit, [1.0, 2.0], [("one", values)], "whole", unit, log=unit != "percent")
        for unit, values in lines.items()
    ]
    page = show(page_html(Document("profile", "A device", "It is measured", series=series)))
    for unit, ticks in zip(lines, ticks_of(page), strict=True):
        said = [text for text in ticks if text and text not in ("step", unit)]
        assert len(set(said)) == len(said) > 2, (unit, said)
        assert {"bytes": "kB", "ns": "µs", "relative": "e-", "percent": "%"}[unit] in "".join(said), (unit, said)
