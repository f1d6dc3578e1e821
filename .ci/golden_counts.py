"""Rewrite `data/golden_counts.json` of the package: texts of many kinds, with their tokens by tiktoken.

    uv run python .ci/golden_counts.py

A faster tokenizer is adopted only if it counts each of them the same (`providers/tokenizers_fast.py`).
"""

# ruff: noqa: INP001, RUF001, S311 - a script, not a package; odd characters are what it is about; chance made
# the same every time

import json
import string
from collections.abc import Iterator
from pathlib import Path
from random import Random

from compaction_proxy.providers.tokenizers import DATA_FOLDER, O200K, load_encoding

TARGET = Path(__file__).resolve().parents[1] / "proxy" / "compaction_proxy" / "data" / "golden_counts.json"
RANDOM = Random(20_261_122)

PROSE = (
    "",
    " ",
    "a",
    "hello world",
    "Hello, World!",
    "The order was shipped on 3 March and hasn't arrived yet.",
    "We've checked: it's the customer's invoice; they'll pay, she'd said, I'm sure you're right.",
    "DON'T SHOUT, IT'S RUDE. I'LL WAIT; THEY'VE GONE; WE'RE DONE; HE'D KNOW; I'M OFF.",
    "don’t use “curly” quotes – or do… it’s fine — really.",
    "naïve café déjà vu, Übergröße, smørrebrød, žluťoučký kůň",
    "Jackdaws love my big sphinx of quartz.",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "A man, a plan, a canal: Panama! Was it a car, or a cat, I saw?",
    "iPhone eBay McDonald's O'Neill's rock'n'roll",
    "e.g. i.e. etc. vs. a.m. p.m. Ph.D. U.S.A. No. 5",
    "One.Two.Three.four,five;six:seven!eight?nine",
    "ſtraßeſ 'ſ it'ſ ſ'ſ K Å ſſ",
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'VE 'M 'LL 'D '' ' s",
    "¿Dónde está la biblioteca? ¡Aquí!",
    "Où est-ce qu'on va l'été ? Aujourd'hui, c'est l'heure.",
    "Die Katze läuft über die Straße und fängt Mäuse.",
    "Il n'y a pas d'œufs; così è, perché no?",
    "Zażółć gęślą jaźń",
    "Việt Nam đất nước con người tươi đẹp",
    "Türkçe: İstanbul'da ılık bir gün, IĞDIR",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "אני אוהב לקרוא ספרים",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "नमस्ते दुनिया, यह एक परीक्षण है।",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "안녕하세요 세계, 오늘은 날씨가 좋네요.",
    "ยินดี ຍິນດີ 你好 γειά ሰላም გამარჯობა Բարեւ",
    "ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ᚠᚢᚦᚨᚱᚲ 𐌰𐌱𐌲 𓀀𓂀",
)
CJK = (
    "压缩代理让长对话继续适合模型的上下文窗口。",
    "你好，世界！今天（星期六）的天气很好；我们去公园吧？",
    "订单编号：A-20391，共12件，合计1299.95元。",
    "日本語のテキストを数えます。カタカナ、ひらがな、漢字。",
    "ｆｕｌｌｗｉｄｔｈ　ＴＥＸＴ　１２３",
    "請確認您的訂單是否已經寄出，謝謝。",
    "東京都千代田区丸の内1-9-1",
    "한국어와 English를 섞어 씁니다 2026년",
    "用Python写的async函数await了吗？",
    "々〆ヶ〇㍿㎏㈱①②③ⅣⅨ",
    "𠀀𠮷𡈽𪚥",
    "的一是不了人我在有他这为之大来以个中上们",
)
CODE = (
    "def f(x: int) -> list[str]:\n    return [str(i) for i in range(x)]\n",
    "if (a && b || !c) { return x?.y ?? z; } // done\n",
    "\tfor (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * b[i];\n\t}\n",
    "SELECT id, name FROM users WHERE age >= 21 ORDER BY name DESC;",
    "git commit -m 'Fix it' && git push --force-with-lease origin HEAD",
    "const λ = (x) => `${x}\\n`;\n",
    '#!/bin/sh\nset -eu\n\necho "$HOME/${1:-x}"\n',
    'fn main() {\n    println!("{:?}", vec![1u8, 2, 3]);\n}\n',
    "class Foo(Bar):\n\n    __slots__ = ('_a', '_b')\n\n\n",
    '<div class="row">\n  <p>Hi&nbsp;there</p>\n</div>\n',
    "body { margin: 0 auto; color: #ff00cc; }",
    "x=1;y=2;z=x+y",
    "camelCaseName snake_case_name SCREAMING_CASE kebab-case-name HTTPServerError2",
    "/usr/local/lib/python3.11/site-packages/",
    "C:\\Users\\me\\file.txt",
    "https://example.com/a/b?c=d&e=%20f#g",
    "a.b.c.d.e()[0]{1}",
    "\\begin{equation} \\frac{a}{b} \\end{equation}",
    "\u0000\u0001\u0002\u001b[31mred\u001b[0m\u007f",
    "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\nKeyError: 'x'\n",
    "@@ -1,4 +1,4 @@\n-old\n+new\n context\n",
    "0xDEADBEEF 0b1010 1e-9 3.14159 1_000_000 -0.5 +7 1,234,567.89",
)
DATA_TEXTS = (
    '{"order_id":"A-20391","items":[{"sku":"é-7","qty":12},null,true],"total":1299.95}',
    '{"a": {"b": [1, 2, [3, {"c": "\\u00e9\\n\\t\\"q\\""}]]}}',
    '[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":[]}]',
    "key: value\nlist:\n  - one\n  - two: 2\n",
    "id,name,price\n1,Bolt,0.25\n2,Nut,0.15\n",
    '2026-11-22T04:13:23.123456Z 127.0.0.1 - - "GET / HTTP/1.1" 200 512',
    "550e8400-e29b-41d4-a716-446655440000",
    "d41d8cd98f00b204e9800998ecf8427e",
    "SGVsbG8sIFdvcmxkIQ== AAAA//+/",
    "+49 (0)30 1234-5678, €1.299,95, £3, ¥500, 50 %, ½ ¼ x² H₂O 10⁻³",
    "1 12 123 1234 12345 123456 1234567",
    "١٢٣٤٥ १२३४५ １２３４５ 四二 Ⅻ 𝟙𝟚𝟛𝟜",
    "3.14159265358979323846264338327950288419716939937510",
    "| a | b |\n| --- | ---: |\n| 1 | 2 |\n",
    "# Title\n\n- one\n- two\n\n1. **bold** and *it*\n\n> quote\n\n```python\nx = 1\n```\n",
    "=====\n-----\n*****\n#####\n",
)
MARKS = (
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, ✅ done 🤷🏽‍♂️",
    "😀😃😄😁😆",
    "❤️ ☎︎ #️⃣ 1️⃣",
    "e\u0301 a\u0308\u0304 n\u0303 Z\u0351\u036b\u0343 ",
    "\u0301\u0301x\u0301",
    "क्षि त्र ज्ञ श्री",
    "가각 \u1100\u1161\u11a8",
    "\u200b\u200d\ufeffzero\u2060width\u00ad",
    "\u202eright to left\u202c",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ≠ ∞ → ∑∫√",
    "𝓯𝓪𝓷𝓬𝔂 𝕿𝖊𝖝𝖙 ⓒⓘⓡⓒⓛⓔ",
    "─│┌┐└┘█▓▒░ ●○◆◇",
    "\ue000\uf8ff\U000f0000",
    "\U0010ffff\ufffd\uffff",
    "\u1f88\u1f80 Ǆ ǅ ǆ ʰʲ ªº",
    "<|endoftext|>",
    "before <|endoftext|> between <|im_start|>system<|im_end|> after <|fim_prefix|>",
    "<|endofprompt|><|start|><|return|><|call|>",
    "<|endoftext|",
    "\uf8f0\uf8f1\uf8f2",
    "ab \ud800 cd \udfff\ud83d!",
    "\ud83d\ude00 joined by halves",
    "\udc00\ud800",
    "x\ud800",
)
BLANKS = (
    "  ",
    "   x",
    "x   ",
    " x  y   z    ",
    "\t\tx\t",
    "a\n\nb\n\n\nc",
    "a \n b  \n  c\n",
    "\r\n\r\nx\r\n",
    "\n \n  \n\t\n",
    " \t \r \n x",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g\u000bh\u000ci",
    "\u3000\u3000x",
    "x \u00a0y",
    "!\n",
    "!!\n\n/ //\n",
    "a  \n",
    " \n",
    "  \u00a0 \u2009z",
    "end.\n\n    indented\n",
    "'\n's \n't",
)
RUNS = (
    (" ", 4_000),
    (" ", 65_536),
    ("a", 65_536),
    ("=", 3_000),
    ("-", 2_000),
    ("\n", 3_000),
    ("\t", 1_000),
    ("0", 2_000),
    ("压", 2_000),
    ("的", 1_000),
    ("ab", 2_000),
    ("aB", 1_000),
    (" a", 2_000),
    ("\r\n", 1_000),
    ("😀", 500),
    ("e\u0301", 1_000),
    ("\u0301", 500),
    ("/", 1_000),
    ("*", 1_000),
    ("□", 1_000),
    ("\u0000", 1_000),
    ("'s", 1_000),
    ("'S", 1_000),
    ("\ud800", 300),
    (" \n", 1_000),
    ("x ", 30_000),
    ("<|endoftext|>", 200),
    ("\u00a0", 1_000),
    ("A", 5_000),
    ("é", 1_000),
)
ALPHABETS = (
    string.ascii_lowercase,
    string.ascii_uppercase,
    string.ascii_letters + string.digits + "+/",
    string.digits,
    "0123456789abcdef",
    string.punctuation,
    string.printable,
    " \t\n\r",
    " \n'sStTdDlLmMvVeErR",
    "=-",
    "".join(map(chr, range(0x4E00, 0x9FA0))),
    "".join(map(chr, range(0x3041, 0x30FF))),
    "".join(map(chr, range(0xAC00, 0xD7A0))),
    "".join(map(chr, range(0x300, 0x370))) + "aeiouAEIOU",
    "".join(map(chr, range(0x1F300, 0x1F700))) + "\u200d\ufe0f",
    "".join(map(chr, range(0x80, 0x3000))),
    "".join(map(chr, range(0x10000, 0x20000))),
    "".join(map(chr, range(0x2000, 0x2070))) + "ab ",
    "aAǅʰª\u0301中 '",
)


def drawn() -> Iterator[str]:
    """Texts of characters drawn from one alphabet each, and texts cut out of the others and put together."""
    for alphabet in ALPHABETS:
        for length in (17, 64, 200):
            yield "".join(RANDOM.choices(alphabet, k=length))
    pool = (*PROSE, *CJK, *CODE, *DATA_TEXTS, *MARKS, *BLANKS)
    for _ in range(40):
        pieces = []
        for text in RANDOM.choices(pool, k=6):
            start = RANDOM.randrange(len(text) + 1)
            pieces.append(text[start : start + RANDOM.randrange(1, 25)])
        yield "".join(pieces)


def main() -> None:
    """Write the file: a row for each text, of the text, how often it is repeated, and its tokens."""
    encoding = load_encoding(O200K, DATA_FOLDER)
    texts = [(text, 1) for text in (*PROSE, *CJK, *CODE, *DATA_TEXTS, *MARKS, *BLANKS, *drawn())]
    rows = [[text, times, len(encoding.encode_ordinary(text * times))] for text, times in (*texts, *RUNS)]
    TARGET.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    print(f"{len(rows)} texts, {TARGET.stat().st_size:,} bytes")  # noqa: T201 - a script prints


if __name__ == "__main__":
    main()
