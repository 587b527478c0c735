"""Waiting until a page has done all that it is going to do, instead of for a length of time.

A page is at rest when no timer is left to run, no picture is loading, nothing moves or changes its color, and a few
frames have been drawn since. Browsers do not tell their timers, so each page counts them from its beginning. Frames
that are hidden draw nothing, and are not waited for.
"""

from __future__ import annotations

from typing import Any

SECONDS = 120  # a page that is not at rest by then is at fault
FRAMES = 3
#: Timers of more than half a second are not counted: they take something back, or look again.
WATCH = """{
window.timers = new Set();
const [begin, end] = [window.setTimeout, window.clearTimeout];
window.setTimeout = (run, wait = 0, ...rest) => {
    const timer = begin((...given) => {
        timers.delete(timer);
        run(...given);
    }, wait, ...rest);
    if (wait <= 500) timers.add(timer);
    return timer;
};
window.clearTimeout = (timer) => {
    timers.delete(timer);
    end(timer);
};
}"""
STILL = """async ([seconds, frames]) => {
    const shown = ({ document }) => [...document.querySelectorAll('iframe')]
        .filter((frame) => frame.contentDocument && frame.getClientRects().length).map((frame) => frame.contentWindow);
    const all = (one) => [one, ...shown(one).flatMap(all)];
    const ends = ({ playState, effect }) => playState === 'running' && effect.getComputedTiming().endTime !== Infinity;
    const busy = ({ document, timers = [] }) => [
        ...document.readyState === 'complete' ? [] : ['document'], ...[...timers].map((one) => `timer ${one}`),
        ...document.getAnimations().filter(ends).map((one) => one.transitionProperty || one.animationName),
        ...[...document.images].filter((one) => one.loading !== 'lazy' && !one.complete).map((one) => one.src),
    ];
    const begun = performance.now();
    for (let calm = 0; calm < frames; calm += 1) {
        const left = all(window).flatMap(busy);
        if (left.length) calm = -1;
        if (performance.now() - begun > 1000 * seconds) throw Error(`not at rest: ${left}`);
        await new Promise(requestAnimationFrame);
    }
}"""


def context_of(browser: Any, **options: Any) -> Any:
    """A context of a browser. Its pages can be waited for."""
    made = browser.new_context(**options)
    made.set_default_timeout(1000 * SECONDS)
    made.add_init_script(WATCH)
    return made


def at_rest(page: Any) -> Any:
    """The page, as soon as it is at rest."""
    page.evaluate(STILL, [SECONDS, FRAMES])
    return page
