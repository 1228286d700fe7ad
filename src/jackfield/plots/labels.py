"""Text in a picture: what cannot be seen is given a sign, what the font cannot draw is given its number."""

_SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_NOTHING = "∅"
_LONGEST = 16


def visible(token: str) -> str:
    """`token` as a label: spaces as `␣`, line ends as `⏎`; more than 16 characters end in `…`.

    A `$` stays as it is: the axes draw all text without mathematics.
    """
    shown = drawable("".join(_SIGNS.get(character, character) for character in token))
    return shown[: _LONGEST - 1] + "…" if len(shown) > _LONGEST else shown or _NOTHING


def drawable(text: str) -> str:
    r"""`text` with every character that the font lacks as `\u4e2d`, which matplotlib would warn about and leave out."""
    # matplotlib is optional, and loading it takes half a second.
    from matplotlib import font_manager

    # matplotlib tries the families in order for each character.
    families = [font_manager.FontProperties(family=[name]) for name in font_manager.FontProperties().get_family()]
    fonts = [font_manager.get_font(font_manager.findfont(family)) for family in families]

    def drawn(character: str) -> str:
        known = character.isprintable() and any(font.get_char_index(ord(character)) for font in fonts)
        return character if known else character.encode("unicode_escape").decode("ascii")

    return "".join(map(drawn, text))
