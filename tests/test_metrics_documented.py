"""Dashboard, alert rules and docs/metrics.md against a scrape of a running stack."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from core.metrics import MetricsServer
from orchestrator.metrics import EngineCollector, RequestMetrics
from orchestrator.telemetry import Telemetry
from tests.harness import pool, serving
from tests.policy import make_request
from tests.test_metrics import fetch, watched

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "forerun.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
ROW = re.compile(r"^\| `(forerun_\w+)` \| *(.*?) *\| .*? \| `(.+?)`.* \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def families(tiny_llama: Path) -> dict[str, Metric]:
    """What an orchestrator, a verifier and a drafter serve after a request, by series' stem."""

    async def scrape() -> str:
        registry = CollectorRegistry()
        telemetry = Telemetry(RequestMetrics(registry))
        async with serving(tiny_llama, [pool("perfect", "draft_model", tiny_llama)]) as stack:
            registry.register(EngineCollector(stack.engine.status))
            await watched(stack, telemetry, make_request(max_new_tokens=20))
            texts = []
            for each in (registry, *stack.registries.values()):
                server = MetricsServer(each, 0)
                texts.append(await asyncio.to_thread(fetch, server.address))
                server.stop()
        return "".join(texts)

    found = text_string_to_metric_families(asyncio.run(scrape()))
    return {family.name: family for family in found if not family.name.endswith("_created")}


def samples(family: Metric) -> set[str]:
    """The names under which Prometheus stores a family."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {family.name + suffix for suffix in suffixes[family.type]}


def selectors(expression: str) -> Iterator[Any]:
    """All selectors of a PromQL expression; one that is not PromQL raises ValueError."""
    waiting = [promql_parser.parse(expression.replace("$__rate_interval", "1m"))]
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "VectorSelector":
            yield node
        for name in ("lhs", "rhs", "expr", "args", "param", "vector_selector"):
            below = getattr(node, name, None)
            waiting += below if isinstance(below, list) else [below] if below is not None else []


def rows_of_the_document() -> dict[str, tuple[set[str], str]]:
    """Labels and PromQL of each series in the tables."""
    rows = ROW.findall(DOCUMENT)
    return {name: (set(re.findall(r"\w+", labels)), promql) for name, labels, promql in rows}


def test_every_series_is_documented_with_its_promql(families: dict[str, Metric]) -> None:
    """A series nobody can find, or a documented one that does not exist, is no series."""
    rows = rows_of_the_document()
    documented = {f.name + ("_total" if f.type == "counter" else "") for f in families.values()}
    assert set(rows) == documented
    names = {name for family in families.values() for name in samples(family)}
    for name, (_, promql) in rows.items():
        used = {selector.name for selector in selectors(promql)}
        assert used <= names, name
        assert any(each.startswith(name) for each in used), name


def test_documented_labels_are_the_series_own(families: dict[str, Metric]) -> None:
    """A query by a label that a series lacks is empty, silently."""
    for name, (labels, _) in rows_of_the_document().items():
        family = families[name.removesuffix("_total")]
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name
            for label in labels & {"outcome", "cause", "status", "reason"}:
                assert f"`{sample.labels[label]}`" in DOCUMENT, name


EXPRESSIONS = {
    **{
        f"{panel['id']} {panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    },
    **{rule["alert"]: rule["expr"] for rule in ALERTS},
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_dashboard_and_alerts_ask_for_series_that_exist(
    name: str, families: dict[str, Metric]
) -> None:
    """An empty panel, or an alert that can never fire, looks like health."""
    by_sample = {sample: family for family in families.values() for sample in samples(family)}
    documented = rows_of_the_document()
    found = list(selectors(EXPRESSIONS[name]))
    assert found
    for selector in found:
        family = by_sample[selector.name]
        labels, _ = documented[family.name + ("_total" if family.type == "counter" else "")]
        assert {m.name for m in selector.matchers.matchers} <= labels


def test_the_dashboard_has_no_two_panels_in_one_place() -> None:
    """Grafana shuffles panels that overlap, and shows one of two with the same id."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    """Who is woken by an alert must find it in the document, and nothing there that never fires."""
    names = [rule["alert"] for rule in ALERTS]
    rows = re.findall(r"^\| `(Forerun\w+)` \| (.+?) \| (.+?) \|$", DOCUMENT, flags=re.MULTILINE)
    assert sorted(names) == sorted(name for name, _, _ in rows)
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]


def test_an_alert_on_a_value_that_no_label_has_can_never_fire() -> None:
    """`outcome="overload"` would be valid PromQL, and silent for ever."""
    for rule in ALERTS:
        for selector in selectors(rule["expr"]):
            for matcher in selector.matchers.matchers:
                for value in matcher.value.split("|"):
                    assert f"`{value}`" in DOCUMENT or f'"{value}"' in DOCUMENT, rule["alert"]
