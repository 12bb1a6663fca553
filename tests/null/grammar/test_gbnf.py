"""Grammars in llama.cpp's notation: how they are read, and which texts they let through."""

from __future__ import annotations

import re

import pytest
from vllmx_core.errors import GrammarError
from vllmx_engine.grammar.gbnf import is_gbnf, parse_gbnf
from vllmx_engine.grammar.matcher import allowed_ids

from .conftest import Grammarian
from .gbnf_trees import Language, Trees, begins_with_itself, regex, written

ALPHABET = 'abz09-_^[]\\"(){}|*+?.,#<>!:= \n\t\r\x00\x7fé赤\U0001f600'


@pytest.mark.parametrize("hundred", range(10))
def test_a_written_tree_reads_back(hundred: int) -> None:
    for seed in range(1000 * hundred, 1000 * hundred + 1000):
        rules = Trees(seed, ALPHABET, tokens=True).rules(
            names=1 + seed % 7, depth=(1, 1, 2, 2, 3)[seed % 5]
        )
        text = written(rules, seed)
        assert parse_gbnf(text, int) == rules, text


@pytest.mark.parametrize("seed", range(40))
def test_grammars_without_recursion_match_as_regular_expressions_do(
    seed: int, grammarian: Grammarian
) -> None:
    trees = Trees(seed, "ab\n")
    rules = trees.regular(depth=2)
    expression = re.compile(regex(rules["root"], rules))
    grammar = grammarian.compiled(grammar=written(rules, seed))
    texts = {trees.text(6) for _ in range(30)}
    texts |= {text for one in range(6) if (text := grammarian.draw(grammar, one, 20)) is not None}
    for text in texts:
        expected = expression.fullmatch(text) is not None
        assert grammarian.accepts(grammar, text) == expected, (text, written(rules, seed))


@pytest.mark.parametrize("seed", range(80))
def test_grammars_with_recursion_let_through_what_they_stand_for(
    seed: int, grammarian: Grammarian
) -> None:
    trees = Trees(seed, "ab")
    rules = trees.rules(names=1 + seed % 3, depth=3)
    texts = {trees.text(6) for _ in range(30)} | {""}
    expected = {text: Language(rules, text).matches() for text in texts}
    try:
        grammar = grammarian.compiled(grammar=written(rules, seed))
    except GrammarError:
        assert not any(expected.values()) or begins_with_itself(rules)
        return
    found = {text: grammarian.accepts(grammar, text) for text in texts}
    assert found == expected, written(rules, seed)


FEATURES: dict[str, tuple[str, list[str], list[str]]] = {
    "an optional loop": ('root ::= "a" ([0-9]+)?', ["a", "a12"], ["", "a1b"]),
    "a counted loop": ('root ::= ("a"+){2}', ["aa", "aaa"], ["a", ""]),
    "a loop of loops": ('root ::= (("x")*)+', ["", "xx"], ["y"]),
    "an optional count": ("root ::= ([0-9]{2})?", ["", "12"], ["1", "123"]),
    "counts": ('root ::= "a"{2,3} "b"{1,} "c"{0,1} "d"{0}', ["aab", "aaabbc"], ["ab", "aabd"]),
    "two marks": ('root ::= "ab"+?', ["", "abab"], ["a"]),
    "code points": (r'root ::= "\u00e9\xe9" [\U0001f600-\U0001f64f]', ["éé\U0001f601"], ["ee"]),
    "escapes": (r'root ::= "\n\t\r\\\"\[\]\-\/\0" [\]\[\-^]+', ['\n\t\r\\"[]-/\x00]^-['], [""]),
    "a range and a dash": ("root ::= [-a] [a-] [+--] [^^]", ["-a,x", "a--b"], ["b--b", "---^"]),
    "odd characters": (
        'root ::= "\x7f\u2028\xad/" [^/]',
        ["\x7f\u2028\xad/a"],
        ["\x7f\u2028\xad//"],
    ),
    "any character": ('root ::= "a" . [^]', ["abc", "a\n\n"], ["ab"]),
    "surrogates in a range": (r"root ::= [\u0080-\uffff]", ["赤"], ["a"]),
    "names that differ in case": (
        'root ::= foo Foo FOO\nfoo ::= "a"\nFoo ::= "b"\nFOO ::= "c"',
        ["abc"],
        ["aaa", "cba"],
    ),
    "names that differ in a mark": (
        'root ::= a-b a_b aB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"',
        ["123"],
        ["111", "222"],
    ),
    "names of Lark": (
        'root ::= start import json\nstart ::= "1"\nimport ::= "2"\njson ::= start?',
        ["12", "121"],
        ["1"],
    ),
    "options in lines of their own": (
        'root ::= "a"\n  | "b"  # one\n\n  # two\n  | c\nc ::=\n  "z"\n  "y"',
        ["a", "b", "zy"],
        ["z", "ab"],
    ),
    "a group over lines": ('root ::= (\r\n  "a" # x\r\n  |\r\n  "b"\r\n)\r\n', ["a", "b"], [""]),
    "no text": ('root ::= | "a" ( ) ""', ["", "a"], ["b"]),
    "the last rule of a name": ('root ::= a\na ::= "1"\na ::= "2"', ["2"], ["1"]),
    "rules that nothing uses": ('root ::= "a"\nb ::= b "c"', ["a"], ["c"]),
    "what follows takes from a loop": (
        'root ::= [a-z]+ "b" root | "."',
        ["ab.", "bbb.", "abab."],
        [".b", "a."],
    ),
    "a word that begins another": (
        'root ::= ("in" | "int" | "(" root ")") ("t" | "8")',
        ["int", "intt", "int8", "(in8)t"],
        ["in", "(int)8x"],
    ),
    "what begins with itself": ('root ::= "x" | root "+" "x"', ["x", "x+x+x"], ["x+", "+x"]),
    "deep groups": ("root ::= " + "(" * 99 + '"a" root? "b"' + ")" * 99, ["ab", "aabb"], ["aab"]),
    "a chain of rules": (
        "root ::= r0\n" + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(150)) + 'r150 ::= "b"',
        ["a" * 150 + "b"],
        ["ab"],
    ),
    "many words between brackets": (
        'root ::= (word | "[" root "]")*\nword ::= ' + "|".join(f'"w{n}"' for n in range(500)),
        ["w1w22[w333]", ""],
        ["w500", "[w1"],
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_the_notation(name: str, grammarian: Grammarian) -> None:
    text, good, bad = FEATURES[name]
    grammar = grammarian.compiled(grammar=text)
    assert [one for one in good if not grammarian.accepts(grammar, one)] == []
    assert [one for one in bad if grammarian.accepts(grammar, one)] == []


JSON = r"""
# JSON without blanks at the begin
root    ::= object
value   ::= object | array | string | number | ("true" | "false" | "null") ws
object  ::= "{" ws ( member ("," ws member)* )? "}" ws
member  ::= string ":" ws value
array   ::= "[" ws (
    value ("," ws value)*
  )? "]" ws
string  ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number  ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws      ::= | " " ws | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (sum "=" ws product "\n")+
sum   ::= product ([-+] ws product)*
product ::= factor ([*/] ws factor)*
factor ::= name | num | "(" ws sum ")" ws
name  ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= ([ \t\n] ws)?
"""
CHESS = r"""
root ::= ( "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+ )
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
C = r"""
root ::= (declaration)*
declaration ::= type identifier "(" parameter? ")" "{" statement* "}"
type ::= ("int" | "float" | "char") ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= type identifier
statement ::= identifier ws "=" ws expression ";" | "return" ws expression ";" | block
block ::= "if" ws "(" expression ")" "{" statement* "}" ("else" "{" statement* "}")?
expression ::= term (ws ("+" | "-" | "==") ws term)*
term ::= identifier | [0-9]+ | "(" expression ")"
ws ::= ([ \t\n]+)?
"""
GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "json": (
        JSON,
        ["{}", '{"a": [1, -2.5e3,  "x\\n\\u00e9"], "b":{"c": true }\n}'],
        ["{", '{"a":}', '{"a": 1,}', "[1]"],
    ),
    "arithmetic": (ARITHMETIC, ["a+b=1\n", "(a * 2)- 3=4\n"], ["a+=1\n", "a=1"]),
    "chess": (CHESS, ["1. e4 e5\n2. Nf3 exd5\n13. O-O-O Qxf7#\n"], ["1. e4 e5\n", "1. e9 e5\n"]),
    "c": (
        C,
        ["int main(){return 0;}", "int f(char c){x = (y + 12);if (x==1){y =2;}else{}return x;}"],
        ["int main(){return;}", "intmain(){"],
    ),
    "japanese": (
        'root ::= word ([ \\t\\n] word)*\nword ::= [ぁ-ゟ]+ | [ァ-ヿ]+ | [一-龯] | "。"',
        ["ひらがな カタカナ 赤"],
        ["latin", "赤赤"],
    ),
    "list": ('root ::= ("- " item)+\nitem ::= [^\\n]+ "\\n"', ["- a\n- b - c\n"], ["- \n", "a\n"]),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_as_users_write_them(name: str, grammarian: Grammarian) -> None:
    text, good, bad = GRAMMARS[name]
    grammar = grammarian.compiled(grammar=text)
    assert [one for one in good if not grammarian.accepts(grammar, one)] == []
    assert [one for one in bad if grammarian.accepts(grammar, one)] == []


def test_tokens_are_named_by_id_and_by_text(grammarian: Grammarian) -> None:
    rules = "root ::= <|im_start|> rest* <[1]>\nrest ::= !<|im_start|>"
    grammar = grammarian.compiled(grammar=rules)
    assert grammarian.accepts(grammar, "<|im_start|>some text<|im_start|>")
    assert not grammarian.accepts(grammar, "<|im_start|>some text")
    assert not grammarian.accepts(grammar, "some<|im_start|>")
    matcher = grammar.start()
    matcher.consume(grammarian.lexicon.specials["<|im_start|>"])
    mask = grammar.first_mask.copy()
    matcher.fill_mask(mask)
    ends = set(grammarian.tokenizer.eos_token_ids)
    assert not ends & set(allowed_ids(mask).tolist()), "the answer cannot end here"


def test_texts_of_one_token_are_tokens(grammarian: Grammarian) -> None:
    (word,) = grammarian.tokenizer.encode("<", add_special_tokens=False)
    grammar = grammarian.compiled(grammar=f'root ::= <[{word}]> "b"')
    assert grammarian.accepts(grammar, "<b")
    with pytest.raises(GrammarError, match="no single token <several words>"):
        grammarian.compiled(grammar="root ::= <several words>")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('root ::= "abc', 'line 1, column 10: the text has no closing "'),
        ('root ::= "a" |\n  [a-', "line 2, column 3: the character class has no closing ]"),
        ("root ::= [z-a]", "line 1, column 11: the range 'z-a' is empty"),
        ("root ::= []", "line 1, column 10: the character class has no character"),
        ('# x\nroot ::= ("a"\nb ::= "c"', "line 2, column 10: 'b' is not expected in a group"),
        ('root ::= "a" )', "line 1, column 14: ')' is not expected here"),
        ('root ::= * "a"', "line 1, column 10: '*' is not expected here"),
        ('root ::= "a"\nfoo = "b" ::=', "line 2, column 5: '=' is not expected here"),
        ('root ::= "a"\n\nb ::= "d" none', "line 3, column 11: there is no rule 'none'"),
        ('a ::= "::="', 'the grammar has no rule "root"'),
        (r'root ::= "\q"', "line 1, column 11: there is no escape \\q"),
        (r'root ::= "\u12"', "line 1, column 11: \\u needs 4 hexadecimal digits"),
        (r'root ::= "\U00110000"', "\\U00110000 is not a character"),
        (r'root ::= "\ud800"', "\\ud800 is not a character"),
        ('root ::= "a"{2,1}', "the repetition {2,1} has a maximum below its minimum"),
        ('root ::= "a"{,2}', "a repetition is written {3}, {3,} or {3,5}"),
        ('root ::= "a"{9999999}', "a repetition is at most"),
        ("root ::= <[99999]>", "the model has no single token <[99999]>"),
        ("root ::= !x", "a token is written <[7]>"),
        ("root ::= " + "(" * 101 + '"a"' + ")" * 101, "column 110: groups are nested too deeply"),
        ('root ::= "a" (= "b")', "'=' is not expected in a group"),
    ],
)
def test_errors_name_line_and_column(text: str, said: str, grammarian: Grammarian) -> None:
    with pytest.raises(GrammarError, match=re.escape(said)):
        grammarian.compiled(grammar=text)


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ('root ::= "a"', True),
        ('\n\n  root::="a"', True),
        ('root\n  ::= "start: x"', True),
        ('start: "x ::= y"', False),
        ("%llguidance {}\nstart: /a::=b/", False),
        ('start: a\na: "::=" | "b"', False),
    ],
)
def test_gbnf_is_told_from_lark(text: str, is_it: bool) -> None:
    assert is_gbnf(text) == is_it
