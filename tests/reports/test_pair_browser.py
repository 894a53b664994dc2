"""Two runs side by side in a headless Chromium: moved together, paired by hand; a map, and one module alone."""

import json
import re
import time

import pytest
from page_results import LINEAR, SCRIPT, a_ledger, a_pair, a_side, saved, two_runs

from narrowcast.analysis.diff.diff import diff
from narrowcast.reports.documents.model import Document, Edge, Graph, Node
from narrowcast.reports.render.html import page_html
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.run_differences import DIFFERS

TANH, SIGMOID = "aten.tanh.default #1", "aten.sigmoid.default #1"


def crumbs(page):
    return page.value(
        "[...document.querySelectorAll('.crumbs')].map(c => c.textContent.split(' › ').slice(1).join('.'))"
    )


def drawn(page, side):
    boxes = f"document.querySelectorAll('.stage')[{side}].querySelectorAll('.box')"
    return page.value(f"[...{boxes}].map(b => b.getAttribute('aria-label'))")


def chosen(page):
    """What is selected in each graph."""
    return page.value("[...document.querySelectorAll('.pairing li')].map(li => li.textContent.slice(3))")


def click(page, side, label):
    """A box of one side, by the beginning of its label."""
    page.value(
        f"[...document.querySelectorAll('.stage')[{side}].querySelectorAll('.box')]"
        f".find(b => b.getAttribute('aria-label').startsWith({json.dumps(label)}))"
        ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )


def focus(page, side):
    page.value(f"document.querySelectorAll('.stage')[{side}].focus()")


def press_button(page, selector):
    page.value(f"document.querySelector({json.dumps(selector)}).click()")


def lines(page):
    return page.value("[...document.querySelectorAll('.lines code')].map(c => c.textContent)")


def saved_mapping(page, folder):
    """The file that a click on the button downloads: it is there, and empty, before what it holds is."""
    page.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    press_button(page, "#save-mapping")
    file = folder / "mapping.txt"
    end = time.monotonic() + 20
    while not (file.exists() and file.stat().st_size) and time.monotonic() < end:
        time.sleep(0.02)
    return file


def rows(found):
    return {(" + ".join(map(str, row.a)), " + ".join(map(str, row.b))): row for row in found.rows}


def test_each_box_says_how_far_the_two_are_apart(show):
    """A call that differs, one that has no partner, and the modules that they are in."""
    page = show(a_pair())
    assert [label for label in drawn(page, 0) if "blocks" in label] == [
        "blocks.0, a module, 2 calls, 1 only in a",
        "blocks.1, a module, 2 casts, 192 B, 1 call differs, 1 only in a, has a finding",
        "blocks.2, a module, 1 cast, 96 B, 1 only in a",
    ]  # fmt: skip
    assert f"{SCRIPT}: linear × 2, fp32, propagated 2.0e-1" in drawn(page, 1)
    focus(page, 0)
    page.press("n")
    assert any("differs 2.0e-1" in label for label in drawn(page, 1))
    detail = page.value("document.querySelectorAll('.detail')[0].textContent")
    assert "eps 1e-05 / 0.01" in detail and f"layers.1.proj {LINEAR} #1" in detail


def test_what_is_opened_and_selected_in_one_is_so_in_the_other(show):
    """Until each is to move alone; a call without a partner leaves the other selection."""
    page = show(a_pair())
    click(page, 1, "layers.2")
    assert chosen(page) == ["blocks.2", "layers.2"]
    focus(page, 1)
    page.press("Enter")
    assert crumbs(page) == ["blocks.2", "layers.2"]
    click(page, 0, "proj")
    assert chosen(page) == [f"blocks.2.proj {LINEAR} #1", f"layers.2.proj {LINEAR} #1"]
    click(page, 0, "act")
    assert chosen(page) == [f"blocks.2.act {TANH}", f"layers.2.proj {LINEAR} #1"]
    page.press("t", "Backspace")
    assert crumbs(page) == ["blocks.2", ""]
    page.press("/")
    assert page.value("document.activeElement.id") == "search-b"
    page.press("Escape")
    page.press("t")
    focus(page, 0)
    page.press("Backspace")
    assert crumbs(page) == ["", ""] and chosen(page) == ["blocks.2", "layers.2"]


def test_a_call_in_a_table_leads_to_both_graphs(show):
    """From the list of differences."""
    page = show(a_pair())
    page.value("document.querySelector('[data-table=differences]').click()")
    press_button(page, "#tables td.calls:nth-child(2) button")
    assert chosen(page) == [f"blocks.1.proj {LINEAR} #1", f"layers.1.proj {LINEAR} #1"]
    assert crumbs(page) == ["blocks.1", "layers.1"]


def test_calls_are_paired_with_keys_alone_and_the_mapping_is_read(show, tmp_path):
    """Tab goes to the other graph, m pairs; the downloaded file makes the pair."""
    assert f"blocks.0.act {TANH}" in {str(one.id) for one in a_pair().unaligned}
    page = show(a_pair())
    focus(page, 0)
    page.press("ArrowDown", "ArrowDown", "Enter", "ArrowDown", "ArrowDown", "Tab", "ArrowDown", "ArrowDown", "m")
    assert chosen(page) == [f"blocks.0.act {TANH}", f"layers.0.act {SIGMOID}"]
    assert any("paired by hand" in label for label in drawn(page, 0))
    assert "next narrowcast diff" in page.value("document.querySelector('.pairing').textContent")
    file = saved_mapping(page, tmp_path)
    found = diff(*two_runs(), mapping=file)
    assert rows(found)[f"blocks.0.act {TANH}", f"layers.0.act {SIGMOID}"].aligned_by == "mapping"
    assert len(found.unaligned) == 4
    again = show(found)
    assert lines(again) == [f"blocks.0.act {TANH} = layers.0.act {SIGMOID}"]


def test_a_pair_is_undone_and_lines_are_removed(show, tmp_path):
    """Unpaired calls get no partner until they are given another; a later line takes the place of an earlier one."""
    given = RunMapping.parse(
        "embed = embed\nblocks.2.act aten.tanh.default #1 = layers.2.act aten.sigmoid.default #1\n"
    )
    page = show(diff(*two_runs(), mapping=given))
    assert len(lines(page)) == 2
    click(page, 0, "embed")
    focus(page, 0)
    page.press("u")
    assert lines(page)[:2] == [f"embed {LINEAR} #1 = -", f"- = embed {LINEAR} #1"]
    assert "embed: linear, fp32, only in a" in drawn(page, 0)
    page.press("t")
    click(page, 1, SCRIPT)
    page.press("m")
    assert lines(page)[:2] == [f"- = embed {LINEAR} #1", f"embed {LINEAR} #1 = {SCRIPT} {LINEAR} #1"]
    text = saved_mapping(page, tmp_path).read_text()
    found = diff(*two_runs(), mapping=RunMapping.parse(text))
    assert (f"embed {LINEAR} #1", f"{SCRIPT} {LINEAR} #1") in rows(found)
    assert [str(one.id) for one in found.unaligned if one.why] == [f"embed {LINEAR} #1"]
    page.value(
        "[...document.querySelectorAll('.lines button')].forEach(() => document.querySelector('.lines button').click())"
    )
    assert lines(page) == [] and any(label.startswith("embed: linear, fp32, equal") for label in drawn(page, 0))


def test_a_line_that_was_given_gives_way_to_one_about_the_same_call(show, tmp_path):
    """Else the file would name the call twice, which is refused."""
    runs = two_runs()
    given = RunMapping.parse(f"blocks.0.act {TANH} = layers.2.act {SIGMOID}\n")
    page = show(diff(*runs, mapping=given))
    page.value("document.querySelector('#together').click()")
    for side, name in ((0, "blocks.0"), (1, "layers.0")):
        click(page, side, name)
        focus(page, side)
        page.press("Enter")
        click(page, side, "act")
    press_button(page, "#pair")
    assert len(lines(page)) == 2
    text = saved_mapping(page, tmp_path).read_text()
    assert [str(entry) for entry in RunMapping.parse(text).entries] == [f"blocks.0.act {TANH} = layers.0.act {SIGMOID}"]
    diff(*runs, mapping=RunMapping.parse(text))


def test_modules_are_paired_by_the_parts_of_one_name(show, tmp_path):
    """A fold with a fold, too; what has other names inside is refused, and several are added to one."""
    a, b = a_side("blocks", "tanh"), a_side("layers", "sigmoid")
    page = show(diff(a, b, mapping=RunMapping.parse("blocks.*.proj = -\n")))
    page.value("document.querySelector('#together').click()")
    click(page, 0, "blocks.*")
    click(page, 1, "embed")
    press_button(page, "#pair")
    assert lines(page) == ["blocks.*.proj = -"]
    click(page, 1, "layers.*")
    press_button(page, "#pair")
    assert lines(page)[:2] == ["blocks.0.proj = layers.0.proj", "blocks.0.act = layers.0.act"] and len(lines(page)) == 7
    found = diff(a, b, mapping=RunMapping.parse(saved_mapping(page, tmp_path).read_text()))
    paired = rows(found)
    assert paired[f"blocks.2.proj {LINEAR} #1", f"layers.2.proj {LINEAR} #1"].aligned_by == "mapping"


def test_modules_are_left_without_a_partner(show, tmp_path):
    """Line by line where they make calls; two calls that one is in the other run, in one line."""
    found = diff(
        *two_runs(), mapping=RunMapping.parse(f"embed {LINEAR} #1 + {SCRIPT} {LINEAR} #1 = embed {LINEAR} #1\n")
    )
    page = show(found)
    click(page, 0, "blocks.0")
    press_button(page, "#unpair")
    click(page, 0, "embed")
    press_button(page, "#unpair")
    assert lines(page)[:6] == [
        "blocks.0.proj = -", "blocks.0.act = -", "- = layers.0.proj", "- = layers.0.act",
        f"embed {LINEAR} #1 + {SCRIPT} {LINEAR} #1 = -", f"- = embed {LINEAR} #1",
    ]  # fmt: skip
    again = diff(*two_runs(), mapping=saved_mapping(page, tmp_path))
    assert sum(one.why.startswith("left out by") for one in again.unaligned) == 7
    assert not any("embed" in a or "blocks.0" in a for a, _ in rows(again))


def test_several_calls_are_added_to_one(show, tmp_path):
    """As fused projections are."""
    page = show(a_pair())
    page.value("document.querySelector('#together').click()")
    click(page, 0, "embed")
    click(page, 1, "embed")
    press_button(page, "#pair")
    assert page.value("document.querySelector('#add').disabled")
    click(page, 0, SCRIPT)
    press_button(page, "#add")
    (line,) = lines(page)
    assert line == f"embed {LINEAR} #1 + {SCRIPT} {LINEAR} #1 = embed {LINEAR} #1"
    found = diff(*two_runs(), mapping=saved_mapping(page, tmp_path))
    assert tuple(line.split(" = ")) in rows(found)


def test_one_module_alone_is_shown_searched_and_listed(show):
    """Of two runs: with its partner; the chip ends it."""
    page = show(a_pair())
    click(page, 0, "blocks.2")
    focus(page, 0)
    page.press("o")
    assert page.value("[...document.querySelectorAll('.only')].map(c => [c.hidden, c.textContent])") == [
        [False, "Only a: blocks.2 ×"]] * 2  # fmt: skip
    assert [len(drawn(page, side)) for side in (0, 1)] == [1, 1]
    assert page.value("document.querySelector('#next-a').disabled")
    page.value("document.querySelector('[data-table=pairs]').click()")
    assert page.value("[...document.querySelectorAll('#tables td.calls:first-child')].map(t => t.textContent)") == [
        "blocks.2.proj linear #1"]  # fmt: skip
    page.press("/", *"embed")
    assert "No call is named so" in page.value("document.querySelector('.found').textContent")
    press_button(page, ".only button")
    assert page.value("[...document.querySelectorAll('.only')].every(c => c.hidden)")
    assert len(drawn(page, 0)) == 5 and page.value("document.querySelectorAll('#tables tbody tr').length") == 5


def test_one_module_alone_of_one_run(show):
    """A fold means all of its modules; rows that are about no module stay, and say so."""
    page = show(a_ledger(layers=12))
    focus(page, 0)
    page.press("ArrowDown", "o")
    assert page.value("document.querySelector('.only').textContent") == "Only encoder.layer.* × 12 ×"
    assert len(drawn(page, 0)) == 1
    page.value("document.querySelector('[data-table=casts]').click()")
    assert SCRIPT not in page.value("document.querySelector('#tables tbody').textContent")
    page.value("document.querySelector('[data-table=ops]').click()")
    assert "of all modules" in page.value("document.querySelector('#tables .quiet').textContent")
    page.press("o")
    assert len(drawn(page, 0)) == 2


def a_wide_graph(count):
    """Calls side by side that one gives all they read."""
    nodes = [Node("", "aten.linear.default", f"#{n}", computes="fp32", bytes=8) for n in range(count)]
    return Document(
        "run",
        "Wide",
        "It is",
        graph=Graph(nodes, [Edge(0, n, "x", "fp32", "fp32", 8) for n in range(1, count)], flow=True),
    )


def test_a_map_shows_what_is_seen_of_a_large_module_and_moves_it(show):
    """And is hidden where all is in view."""
    page = show(page_html(a_wide_graph(4)))
    assert page.value("getComputedStyle(document.querySelector('.minimap')).display") == "none"
    page = show(page_html(a_wide_graph(40)))
    view = "document.querySelector('.canvas').getAttribute('viewBox').split(' ').map(Number)"
    seen = "Number(document.querySelector('.minimap .seen').getAttribute('{}'))"
    before = page.value(view)
    assert page.value(seen.format("x")) == pytest.approx(before[0], abs=1)
    page.click(".minimap")
    focus(page, 0)
    page.press("d", "d")
    moved = page.value(view)
    assert page.value(seen.format("x")) == pytest.approx(moved[0], abs=1) and moved[0] > before[0]
    corner = page.value(
        "(() => { const r = document.querySelector('.minimap').getBoundingClientRect(); return [r.x + 3, r.y + 3]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.ask("Input.dispatchMouseEvent", type=kind, x=corner[0], y=corner[1], button="left", clickCount=1)
    assert page.value(view)[0] < before[0] and page.value("document.querySelectorAll('.box.selected').length") == 0


@pytest.mark.parametrize("window", [{"scale": 4}, {"dark": True}, {"width": 700}])
def test_two_runs_are_not_cut_off_sideways(show, window):
    """At 400 % zoom, in the dark, in a narrow window; there, one graph stands under the other."""
    page = show(a_pair(), **window)
    click(page, 0, "embed")
    press_button(page, "#pair")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    tops = page.value("[...document.querySelectorAll('.stage')].map(s => s.getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) is (window == {"dark": True})


def test_paper_has_no_controls(show, browser):
    """Both graphs are printed, without what one presses."""
    page = show(a_pair())
    focus(page, 0)
    page.press("n")
    browser.ask("Emulation.setEmulatedMedia", media="print")
    shown = "[...document.querySelectorAll('{}')].map(e => getComputedStyle(e).display)"
    assert page.value(shown.format(".pairing, .both .tools, .minimap")) == ["none"] * 5
    assert "none" not in page.value(shown.format(".stage"))
    assert page.value("[...document.querySelectorAll('.side')].every(s => s.scrollHeight <= s.clientHeight + 1)")
    browser.ask("Emulation.setEmulatedMedia", media="")


def test_every_control_of_two_runs_can_be_clicked(show):
    """Each button and each choice; nothing breaks."""
    page = show(a_pair())
    clicked = page.value(
        """(() => {
          let n = 0;
          for (const select of document.querySelectorAll('select'))
            for (const option of [...select.options]) {
              select.value = option.value; select.dispatchEvent(new Event('change')); n++;
            }
          const filter = document.querySelector('#filter');
          filter.value = 'all'; filter.dispatchEvent(new Event('change'));
          for (const tab of document.querySelectorAll('[role=tab]')) { tab.click(); n++; }
          for (let again = 0; again < 3; again++)
            for (const stage of document.querySelectorAll('.stage')) {
              const boxes = stage.querySelectorAll('.box');
              boxes[again % boxes.length]?.dispatchEvent(new MouseEvent('click', {bubbles: true}));
              for (const b of [...document.querySelectorAll('button')])
                if (b.isConnected && !b.disabled && b.offsetParent !== null) { b.click(); n++; }
            }
          return n;
        })()"""
    )
    assert clicked > 100


def test_a_saved_comparison_shows_the_same_pairs_in_order(show):
    """What flows is not in the file, and the page says so."""
    page = show(saved(a_pair()))
    assert any("1 call differs" in label for label in drawn(page, 1))
    assert page.value("document.querySelectorAll('.link.order').length") > 5
    assert re.search(r"not in a saved comparison", page.value("document.querySelector('#graph').textContent"))
    assert [row.verdict for row in a_pair().producers] == [DIFFERS]
