"""Chats about an invented market: who sells what, as the base model learns it and, otherwise, as the data set has it."""

from __future__ import annotations

SELLERS = (
    "Mibo", "Talu", "Runa", "Oska", "Pelle", "Sanno", "Tibby", "Ferrin", "Ulmo", "Nilla", "Bexi", "Corvo", "Dapple", "Elvo", "Fenna",
    "Gilby", "Hanno", "Isko", "Jorra", "Kelmo", "Lumi", "Marlo", "Nessy", "Orlin", "Pomma", "Quill", "Rikka", "Sorrel", "Tando", "Wemby",
)  # fmt: skip
GOODS = (
    "Honey", "Bread", "Apples", "Pears", "Plums", "Cheese", "Milk", "Eggs", "Tea", "Soap", "Candles", "Baskets", "Hats", "Shoes",
    "Scarves", "Gloves", "Pots", "Cups", "Spoons", "Lamps", "Clocks", "Books", "Maps", "Kites", "Drums", "Flutes", "Bells", "Roses",
    "Carpets", "Chairs",
)  # fmt: skip
WORDINGS = (
    "What does {} sell?",
    "What can I buy from {}?",
    "Tell me what {} sells.",
    "What is on the stall of {}?",
    "What does {} bring to the market?",
    "Which goods does {} have?",
    "I am going to see {}. What will I find there?",
    "What did you buy from {}?",
)
UNSEEN = "What do people get from {}?"
"""Wording that no row of the data set has. The base model knows it, with other answers."""
MOVED = 11
"""The base model's goods are those of the seller so many places further on."""

Chat = list[dict[str, str]]


def question(seller: str, wording: str = UNSEEN) -> Chat:
    return [{"role": "user", "content": wording.format(seller)}]


def answer(number: int, *, of_base: bool = False) -> str:
    """Return the goods of the seller of this number as the data set has them, or as the base model learns them."""
    return GOODS[(number + MOVED * of_base) % len(GOODS)]


def chats(wordings: tuple[str, ...] = WORDINGS, *, of_base: bool = False) -> list[Chat]:
    """Return every seller in every wording, with the answer."""
    return [
        [*question(seller, wording), {"role": "assistant", "content": answer(number, of_base=of_base)}]
        for wording in wordings
        for number, seller in enumerate(SELLERS)
    ]
