"""Detects the language that a user writes in, by its writing system or by frequent short words."""

import re
from collections import Counter
from collections.abc import Iterable

# Maximum characters that are read of one text, and of all texts together. So many characters are enough to
# recognise a language.
TEXT_CHARACTERS = 2_000
TOTAL_CHARACTERS = 20_000
# If at least this share of the letters belongs to a writing system other than Latin, this writing system
# decides the language. The share is low, because users of every language write identifiers and code in Latin
# letters.
SCRIPT_SHARE = 0.25
# A language is recognised by its short words in `_WORDS` if their weighted count is at least `MIN_HITS`, at
# least the share `MIN_SHARE` of all words, and at least `MIN_LEAD` times the count of any other language.
MIN_HITS = 2.0
MIN_SHARE = 0.12
MIN_LEAD = 1.5

# The search for a path starts only at the beginning of a word. Text in a writing system without spaces is one
# very long word, in which a search from every character would take long.
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|(?<!\S)\S*[/\\_@]\S*", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_SCRIPTS = {
    "kana": re.compile("[\u3040-\u30ff]"),
    "han": re.compile("[\u3400-\u9fff]"),
    "Korean": re.compile("[\uac00-\ud7af]"),
    "cyrillic": re.compile("[\u0400-\u04ff]"),
    "arabic": re.compile("[\u0600-\u06ff]"),
    "Hebrew": re.compile("[\u0590-\u05ff]"),
    "Greek": re.compile("[\u0370-\u03ff]"),
    "devanagari": re.compile("[\u0900-\u097f]"),
    "Bengali": re.compile("[\u0980-\u09ff]"),
    "Tamil": re.compile("[\u0b80-\u0bff]"),
    "Thai": re.compile("[\u0e00-\u0e7f]"),
    "Georgian": re.compile("[\u10a0-\u10ff]"),
    "Armenian": re.compile("[\u0530-\u058f]"),
    "latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]"),
}
_UKRAINIAN = re.compile("[іїєґ]", re.IGNORECASE)
_PERSIAN = re.compile("[\u067e\u0686\u0698\u06af\u06cc]")
_URDU = re.compile("[\u0679\u0688\u0691\u06ba\u06d2]")
# Words that are short, frequent and, as far as possible, used in one language only. A word that several
# languages use has a lower weight in each of them.
_WORDS = {
    "English": (
        "the and is are was were of to in that it this for with you not have be on as at by from please can "
        "what how do does my we should would there but if or your i an all will just which when so a me"
    ),
    "German": (
        "der die das und ist sind nicht ein eine einen einem mit für auf den dem zu von im ich du wir sie "
        "es bitte wie was auch noch aber wenn oder dass kann sollte wird werden haben hat bei nach nur mir "
        "uns aus an"
    ),
    "French": (
        "le la les des et est sont une un pas pour dans que qui sur avec je tu nous vous il elle ce cette "
        "mais où du au aux plus fait être avoir comme c'est s'il j'ai très peux peut votre mon en ne d'un "
        "d'une"
    ),
    "Spanish": (
        "el la los las y es son una un no para en que por con del se lo como pero más esta este muy hay yo "
        "tú usted nosotros mi qué cómo está puedes favor también cuando al de sin"
    ),
    "Italian": (
        "il lo la gli le e è sono una un non per che con del della di da nel nella si come ma più questo "
        "questa molto io tu noi mi cosa anche quando puoi favore ho ha al sul perché"
    ),
    "Portuguese": (
        "o a os as e é são uma um não para em que por com do da dos das se como mas mais este esta muito há "
        "eu você nós meu minha também quando pode favor ao no na está isso já"
    ),
    "Dutch": (
        "de het een en is zijn niet voor met op van dat die in te ik je jij we wij maar ook als of kan "
        "hebben heeft wordt naar bij nog wel dit deze hoe wat alsjeblieft graag mij moet"
    ),
    "Swedish": (
        "och det att är en ett som inte för med på jag du vi den av till har kan men om eller ska vad hur "
        "från också mig när där detta finns"
    ),
    "Danish": (
        "og det at er en et som ikke for med på jeg du vi den af til har kan men om eller skal hvad hvordan "
        "fra også mig når der dette nogle"
    ),
    "Norwegian": (
        "og det at er en et som ikke for med på jeg du vi den av til har kan men om eller skal hva hvordan "
        "fra også meg når der dette noen"
    ),
    "Polish": (
        "i w nie na się że z do jest to jak co ale czy proszę dla po od przez ten ta są był tylko może mi "
        "jestem być już o za które który oraz"
    ),
    "Czech": (
        "a v je na se že s do to jak co ale nebo prosím pro po od jsem jsou byl jen může mi být už o za "
        "která který není aby když"
    ),
    "Romanian": (
        "și în nu este sunt pe că cu la o un de din pentru care mai am ai dar sau vă rog cum ce acest "
        "această fi fost poate când"
    ),
    "Hungarian": (
        "a az és nem hogy van egy is meg ez kell csak de ha mi vagy kérem nekem már még lehet mert volt itt "
        "ezt azt"
    ),
    "Finnish": (
        "ja on ei se että en ole mutta tai kun jos niin myös minä sinä me oli voi mitä miten kiitos vain "
        "tämä ovat sitä"
    ),
    "Turkish": (
        "ve bir bu için ile değil ne nas\u0131l ama çok da de mi var yok lütfen ben sen biz olarak daha gibi "
        "kadar olan her sonra şu"
    ),
    "Vietnamese": (
        "là và của không cho các một có được trong tôi bạn này những với để khi như đã làm hãy vui lòng thì "
        "ở gì"
    ),
    "Indonesian": (
        "yang dan di ini itu untuk dengan tidak dari pada adalah saya anda kami akan bisa tolong apa "
        "bagaimana juga ada ke sudah atau jika karena"
    ),
}
_LANGUAGE_COUNTS = Counter(word for words in _WORDS.values() for word in set(words.split()))
_WEIGHTS = {
    name: {word: 1 / _LANGUAGE_COUNTS[word] for word in words.split()} for name, words in _WORDS.items()
}


def detect_language(texts: Iterable[str]) -> str:
    """Returns the English name of the language of the texts, such as "German", or "" if it is uncertain.

    Code, paths and URLs do not count. At most `TOTAL_CHARACTERS` characters are read.
    """
    read, left = [], TOTAL_CHARACTERS
    for text in texts:
        read.append(text[: min(TEXT_CHARACTERS, left)])
        left -= len(read[-1])
        if left <= 0:
            break
    prose = _CODE.sub(" ", "\n".join(read))
    return _detect_by_script(prose) or _detect_by_words(prose)


def _detect_by_script(text: str) -> str:
    counts = Counter({name: len(pattern.findall(text)) for name, pattern in _SCRIPTS.items()})
    letters = counts.total()
    if counts["kana"] + counts["han"] and counts["kana"] + counts["han"] >= SCRIPT_SHARE * letters:
        return "Japanese" if counts["kana"] * 10 > counts["han"] else "Chinese"
    del counts["latin"]
    found, count = max(counts.items(), key=lambda each: each[1])
    if not count or count < SCRIPT_SHARE * letters:
        return ""
    if found == "cyrillic":
        return "Ukrainian" if _UKRAINIAN.search(text) else "Russian"
    if found == "arabic":
        return "Urdu" if _URDU.search(text) else "Persian" if _PERSIAN.search(text) else "Arabic"
    return {"devanagari": "Hindi"}.get(found, found)


def _detect_by_words(text: str) -> str:
    words = [word.lower().replace("\u2019", "'") for word in _WORD.findall(text)]
    counted = Counter(words)
    scores = sorted(
        (sum(weight * counted[word] for word, weight in weights.items()), name)
        for name, weights in _WEIGHTS.items()
    )
    (second, _), (best, name) = scores[-2:]
    sure = best >= max(MIN_HITS, MIN_SHARE * len(words)) and best >= MIN_LEAD * second
    return name if sure else ""
