"""The prompts of the example pipeline: scenes, captions that describe them, and their vocabulary.

A scene is one group of equal shapes at some place in the image, or two groups on opposite sides. The models were
trained only on these captions, so they understand only the words in `VOCABULARY`.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

COLOURS = {
    "red": (217, 26, 33),
    "orange": (255, 133, 0),
    "yellow": (255, 230, 26),
    "green": (20, 153, 56),
    "blue": (26, 71, 230),
    "purple": (140, 33, 173),
    "white": (250, 250, 250),
    "black": (13, 13, 13),
}
SHAPES = ("circle", "square", "triangle", "star", "ring")
PLACES = ("anywhere", "left", "right", "top", "bottom", "centre")
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
SIZES = ("unstated", "small", "large")
MOST = 3

COLOUR_NAMES = tuple(COLOURS)

_ONE = ("a", "a", "a", "one")
_COUNTS = {2: ("two", "two", "2"), 3: ("three", "three", "3")}
_SIZE_WORDS = {1: ("small", "small", "tiny", "little"), 2: ("large", "large", "big")}
_OPENINGS = ("", "", "", "", "a picture of ", "an image of ", "a drawing of ", "draw ")
_PLACE_PHRASES = {
    "left": ("on the left", "on the left", "on the left side", "in the left half", "at the left"),
    "right": ("on the right", "on the right", "on the right side", "in the right half", "at the right"),
    "top": ("at the top", "at the top", "on the top", "in the top half", "in the upper half"),
    "bottom": ("at the bottom", "at the bottom", "on the bottom", "in the bottom half", "in the lower half"),
    "centre": ("in the centre", "in the center", "in the middle", "at the centre"),
}
_RELATIONS = {
    "left": ("left of", "to the left of", "on the left of"),
    "right": ("right of", "to the right of", "on the right of"),
    "top": ("above", "above", "over"),
    "bottom": ("below", "below", "under", "beneath"),
}
_WORD = re.compile(r"\w+")


class Scene(NamedTuple):
    """The content of an image as indices into the tables above, so that a tensor row can be a scene.

    With two groups, `place` is the side of group a; group b is on the opposite side.
    """

    pair: int
    place: int
    background: int
    shape_a: int
    colour_a: int
    count_a: int
    size_a: int
    shape_b: int
    colour_b: int
    count_b: int
    size_b: int


# The demonstration prompts: one group, a place, a relation, and counts with a relation.
PROMPTS = (
    "two red circles above a blue square on a yellow background",
    "a small green triangle on the left on a white background",
    "three yellow stars on a blue background",
    "a large orange ring left of two purple triangles on a black background",
)


def _group(shape: int, colour: int, count: int, size: int, choose: random.Random) -> str:
    """Return a noun phrase for a group, such as "two small red circles"."""
    words = f"{COLOUR_NAMES[colour]} {SHAPES[shape]}"
    if size:
        words = f"{choose.choice(_SIZE_WORDS[size])} {words}"
    if count > 1:
        return f"{choose.choice(_COUNTS[count])} {words}s"
    article = choose.choice(_ONE)
    if article == "a" and words[0] == "o":
        article = "an"
    return f"{article} {words}"


def _subject(scene: Scene, choose: random.Random) -> str:
    """Return a phrase for the groups and their places, without the background."""
    first = _group(*scene[3:7], choose)
    place = PLACES[scene.place]
    if not scene.pair:
        if place == "anywhere":
            return first
        where = choose.choice(_PLACE_PHRASES[place])
        return f"{where} {first}" if choose.random() < 0.08 else f"{first} {where}"
    second = _group(*scene[7:11], choose)
    way = choose.random()
    if way < 0.5:
        return f"{first} {choose.choice(_RELATIONS[place])} {second}"
    other = OPPOSITE[place]
    if way < 0.75:
        return f"{second} {choose.choice(_RELATIONS[other])} {first}"
    if way < 0.88:
        return f"{first} {choose.choice(_PLACE_PHRASES[place])} and {second} {choose.choice(_PLACE_PHRASES[other])}"
    return f"{second} {choose.choice(_PLACE_PHRASES[other])} and {first} {choose.choice(_PLACE_PHRASES[place])}"


def caption(scene: Scene, choose: random.Random, *, background: bool = True) -> str:
    """Return a random caption for a scene, optionally without its background.

    >>> scene = Scene(1, 3, 2, 0, 0, 2, 0, 1, 4, 1, 0)
    >>> caption(scene, random.Random(1))
    '2 red circles above a blue square with a yellow background'
    """
    opening = choose.choice(_OPENINGS)
    subject = _subject(scene, choose)
    if not background:
        return opening + subject
    name = COLOUR_NAMES[scene.background]
    article = "an" if name[0] == "o" else "a"
    way = choose.random()
    if way < 0.65:
        return f"{opening}{subject} on {article} {name} background"
    if way < 0.8:
        return f"{opening}{subject} with {article} {name} background"
    if way < 0.92:
        return f"{opening}{subject}, {name} background"
    return f"on {article} {name} background, {subject}"


def _words() -> tuple[str, ...]:
    """Return every word that a caption can contain, sorted."""
    phrases = [*_OPENINGS, *_ONE, "an", "on with background and", *COLOURS, *SHAPES, *(shape + "s" for shape in SHAPES)]
    for table in (_COUNTS, _SIZE_WORDS, _PLACE_PHRASES, _RELATIONS):
        for ways in table.values():
            phrases.extend(ways)
    return tuple(sorted({word for phrase in phrases for word in _WORD.findall(phrase)}))


VOCABULARY = _words()
_KNOWN = frozenset(VOCABULARY)


def words(prompt: str) -> list[str]:
    """Split a prompt into words as the pipeline's tokenizers do: lower case, without punctuation.

    >>> words("Two red circles, blue background!")
    ['two', 'red', 'circles', 'blue', 'background']
    """
    return _WORD.findall(prompt.lower())


def unknown_words(prompt: str) -> list[str]:
    """Return the words of a prompt that are not in the vocabulary, each once, in order.

    >>> unknown_words("a red dragon above a blue square, a dragon")
    ['dragon']
    """
    return list(dict.fromkeys(word for word in words(prompt) if word not in _KNOWN))
