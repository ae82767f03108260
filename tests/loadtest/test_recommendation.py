import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

from gateway.config import load_config
from loadtest.errors import ExitCode, UsageError
from loadtest.reports import forms, recommendation
from loadtest.reports.recommendation import Recommendation
from loadtest.wording import ms, rate
from tests.loadtest.examples import TRUTHS, example_recommendation
from tests.loadtest.simulated_lab import Truth

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "recommendation.json"
IMPOSSIBLE = {name: Truth(0) for name in TRUTHS}


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return example_recommendation(target_rps=900)


@pytest.fixture(scope="module")
def nobody() -> Recommendation:
    return example_recommendation(IMPOSSIBLE)


def test_the_document_round_trips(found: Recommendation, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(recommendation.to_json(found))
    assert recommendation.read(path) == found


def test_the_published_schema_is_the_documents(found: Recommendation, nobody: Recommendation) -> None:
    published = json.loads(SCHEMA.read_text())
    assert published == json.loads(json.dumps(recommendation.schema())), "write it anew: json.dumps(schema(), indent=2)"
    for document in (found, nobody):
        jsonschema.validate(json.loads(recommendation.to_json(document)), published)


def test_awss_names_and_units_stand_beside_ours(found: Recommendation) -> None:
    first = json.loads(recommendation.to_json(found))["InferenceRecommendations"][0]
    winner = found.candidate(found.winner or "")
    assert first["EndpointConfiguration"]["InstanceType"] == "ml.c7i.large"
    assert first["EndpointConfiguration"]["InitialInstanceCount"] == 2
    metrics = first["Metrics"]
    assert metrics["MaxInvocations"] == int(winner.max_rps * 60)
    assert metrics["CostPerInference"] == pytest.approx(0.08925 / (winner.max_rps * 60 * 60))
    assert first["ModelConfiguration"]["EnvironmentParameters"] == [{"Key": "sessions", "ValueType": "String", "Value": "2"}]


def test_the_winner_comes_first_and_everyone_has_a_price_with_its_source(found: Recommendation) -> None:
    assert found.candidates[0].name == found.winner
    assert [candidate.status for candidate in found.candidates][:2] == ["in the fleet", "in the fleet"]
    assert found.candidates[0].name == "c7i.large synthetic (sessions 2)"
    assert all(candidate.price.source and candidate.price.date for candidate in found.candidates)
    assert found.exit_code == ExitCode.MET


def test_a_mix_for_the_target_rate_is_offered_with_its_autoscaling_target(found: Recommendation) -> None:
    assert found.fleet is not None
    assert found.fleet.capacity_rps * found.headroom >= 900
    assert found.autoscaling_invocations_per_minute == pytest.approx(found.candidates[0].max_rps * 0.5 * 60)


def test_an_impossible_slo_ends_with_the_best_there_is_and_exit_code_1(nobody: Recommendation) -> None:
    assert nobody.exit_code == ExitCode.MISSED
    assert nobody.answer.startswith("NO CANDIDATE: not one was seen to keep p99 under 50 ms. ")
    assert nobody.floor is not None
    assert f"{ms(nobody.floor.p99_ms)} p99 of A, the quickest, hardly loaded with {rate(nobody.floor.rps)}" in nobody.answer
    assert nobody.configuration == {}


def test_the_configuration_to_deploy_is_valid_and_says_where_it_comes_from(found: Recommendation, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(forms.configuration(found))
    config = load_config(path)
    assert config.models[0].backends[0].sessions == 2
    assert path.read_text().startswith("# PROVEN: 2 × A + 1 × B are the cheapest fleet that was proven: A is c7i.large")


def test_every_file_is_written(found: Recommendation, nobody: Recommendation, tmp_path: Path) -> None:
    names = {path.name for path in forms.write_all(found, tmp_path)}
    assert names == {"report.json", "report.html", "report.md", "report.csv", "junit.xml", "gateway.yaml"}
    assert "gateway.yaml" not in {path.name for path in forms.write_all(nobody, tmp_path)}
    assert not (tmp_path / "gateway.yaml").exists()  # not that of the earlier search


def test_a_report_that_cannot_be_written_costs_no_other(found: Recommendation, tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(UsageError, match=r"report\.json: cannot be written: .*Is a directory"):
        forms.write_all(found, tmp_path)
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {"report.html", "report.md", "report.csv", "junit.xml", "gateway.yaml"}


class Page(HTMLParser):
    """Checks nesting, and collects what could reach outside."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_without_script_or_links(found: Recommendation, nobody: Recommendation) -> None:
    for document in (found, nobody):
        text = forms.render(document, "html")
        page = Page()
        page.feed(text)
        assert page.open == []
        assert page.links == ["data:,"]  # no icon is asked for either
        assert "script" not in page.tags
        assert "http" not in text
    drawn = forms.render(found, "html")
    assert drawn.count("<svg") == drawn.count("<h3>") >= 8


def test_the_page_escapes_what_comes_from_files() -> None:
    candidates = [{"instances": ["c7i.large"], "backend": {"kind": "synthetic", "name": "<b>&"}, "settings": {"sessions": [1]}}]
    found = example_recommendation({"c7i.large <b>& (sessions 1)": Truth(300)}, candidates=candidates)
    text = forms.render(found, "html")
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text


def test_junit_fails_when_nobody_meets_the_slo(found: Recommendation, nobody: Recommendation) -> None:
    good, bad = (ElementTree.fromstring(forms.render(document, "junit")) for document in (found, nobody))
    assert (good.get("failures"), bad.get("failures")) == ("0", "1")
    assert bad.find("testcase/failure") is not None
    assert good.get("tests") == str(len(good.findall("testcase")))


def test_markdown_and_text_tell_the_answer(found: Recommendation) -> None:
    for form in ("md", "text"):
        text = forms.render(found, form)
        assert "2 × A + 1 × B are the cheapest fleet that was proven: A is c7i.large, sessions 2; B" in " ".join(text.split())
        assert "is what B alone, the runner-up, costs for 900/s, against A alone" in " ".join(text.split())


def test_markdown_takes_the_models_name_for_no_markup(found: Recommendation) -> None:
    heading = forms.markdown(replace(found, model="<b>*m*_1")).splitlines()[0]
    assert "serve &lt;b>\\*m\\*\\_1 at" in heading


def test_csv_has_one_line_per_candidate(found: Recommendation) -> None:
    lines = forms.render(found, "csv").splitlines()
    assert len(lines) == 1 + len(found.candidates)
    assert lines[0].startswith("candidate,status,letter,state,InstanceType,")


def test_a_file_that_is_no_recommendation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"x\.json: is no result of `loadtest recommend`"):
        recommendation.read(path)


def test_the_configuration_is_plain_yaml(found: Recommendation) -> None:
    assert yaml.safe_load(forms.configuration(found)) == found.configuration
