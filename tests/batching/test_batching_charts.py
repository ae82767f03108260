"""The page that `python -m benchmarks.batching --plot` writes."""

from benchmarks.batching_charts import page


def test_the_page_has_a_chart_for_each_case_and_names_each_rule() -> None:
    curves = {"adaptive": [(60.0, 59.0), (100.0, 97.0)], "fixed <8>": [(60.0, 58.0), (100.0, 40.0)]}
    text = page({"a case": curves, "another": curves}, "made today")
    assert text.count("<svg") == 2
    assert "<h3>a case</h3>" in text
    assert "fixed &lt;8&gt;" in text
    assert "fixed <8>" not in text
    assert text.index("made today") > text.rindex("</svg>")
