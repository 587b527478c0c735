"""Predict, then reveal: nothing is shown before the answer, and the result can be checked."""

import re
from typing import Any

import pytest

from captum_vz.errors import ArgumentError
from captum_vz.visualization import View, view
from tests.view.pages import TOKENS, Open, at_rest, layer, numbers, part, shares, token, underlined

LAYERS = [shares(8, 1), shares(8, 2)]


def made(**options: Any) -> View:
    return view({"one": LAYERS}, TOKENS, **options)


def ranked(row: int) -> list[int]:
    found: list[int] = LAYERS[1][row].argsort(descending=True).tolist()
    return [place for place in found if place != row]


def test_nothing_is_shown_before_the_answer(opened: Open) -> None:
    page = opened(made(predict=[5, 2]).html())
    assert page.inner_text("#question").startswith(
        "Question 1 of 2: which other token does hat draw on most, in one, layer 1?"
    )
    token(page, "the").hover()
    at_rest(page)
    assert set(numbers(page)) == {""}
    assert not underlined(page)
    assert page.inner_text("#read") == ""
    assert page.inner_text(".answer") == ""
    for hidden in ("#depths", "#table", "#svg"):
        assert not page.locator(hidden).is_visible()
    token(page, "hat").press("ArrowDown")
    assert page.inner_text("#question").endswith("layer 1? Choose a token.")
    token(page, "hat").click()  # the token itself is no answer
    assert page.inner_text("#question").startswith("Question 1")


def test_answers_are_scored_and_handed_in(opened: Open) -> None:
    shown = made(predict=[5, 2])
    page = opened(shown.html())
    page.keyboard.press("Tab")
    token(page, TOKENS[ranked(5)[0]]).click()
    text = page.inner_text("#question")
    assert re.match(r"Right: .* number 1 of 7\. 100 points\.$", text)
    assert f"{LAYERS[1][5, ranked(5)[0]]:.3f}" in text
    assert any(numbers(page))
    page.keyboard.press("Enter")  # the focus is on "Next question"
    wrong = ranked(2)[1]
    token(page, TOKENS[wrong]).click()
    points = round(100 * (LAYERS[1][2, wrong] / LAYERS[1][2, ranked(2)[0]]).item())
    assert f"number 2 of 7. The strongest is {TOKENS[ranked(2)[0]]}" in page.inner_text("#question")
    page.click("#next")
    total = int((100 + points) / 2 + 0.5)
    assert page.inner_text("#question") == f"Score: 1 of 2 right, {total} of 100 points."
    result = page.input_value("#result")
    assert shown.grade(result) == (2, 1, total)
    assert not page.locator("#depths").is_visible()  # it is empty without a token
    page.click("#stop")
    assert layer(page, "layer 0").is_visible()


def test_words_and_filters_are_graded(opened: Open) -> None:
    shown = made()
    page = opened(shown.html())
    part(page, "options")
    page.select_option("#unit", "words")
    page.get_by_label("special").check()
    part(page, "predict")
    while page.locator("#question").inner_text().startswith("Question"):
        asked = page.locator(".flow button.now").inner_text().strip()
        choices = [one for one in ("pictures", "hat") if one not in asked]
        token(page, choices[0]).click()
        page.click("#next")
    score = shown.grade(page.input_value("#result"))
    assert score.questions == 4  # the, pictures, of, hat
    assert page.inner_text("#question") == f"Score: {score.right} of 4 right, {score.points} of 100 points."


@pytest.mark.parametrize("predict", [True, False])
def test_chosen_token_is_asked_first(predict: bool, opened: Open) -> None:
    page = opened(made(token=3, predict=predict).html())
    part(page, "predict")
    assert page.inner_text("#question").startswith("Question 1 of 5: which other token does ##tures draw on")
    page.click("#stop")
    assert page.locator(".flow [aria-pressed=true]").text_content() == "##tures"


def test_wrong_results_are_refused() -> None:
    shown = made()
    page = re.search(r'"id":"(\w+)"', shown.html())
    assert page
    best = ranked(5)[0]
    good = f"captum-vz-predict 1; page {page[1]}; method 0; map 1; pieces; without -; 5>{best}; 1 right; 100 points"
    assert shown.grade(f" {good}\n") == (1, 1, 100)
    for changed, complaint in (
        (good.replace("100 points", "99 points"), "1 right and 100"),
        (good.replace(page[1], "00000000"), "is of page 00000000"),
        (good.replace(f"5>{best}", "5>5"), "does not have"),
        (good.replace("map 1", "map 7"), "does not have"),
        ("hello", "is no result string"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            shown.grade(changed)
    other = view({"one": LAYERS[::-1]}, TOKENS)
    with pytest.raises(ArgumentError, match="pass the same maps"):
        other.grade(good)
