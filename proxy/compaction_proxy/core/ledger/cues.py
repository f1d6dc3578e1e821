"""Patterns of words that show what a statement is, such as a rule, a request or a correction.

The patterns expect the text of one statement as `core.ledger.statements.fold_text` returns it: in lower case,
with plain apostrophes and single spaces. Callers limit the length of this text. Languages: English, Chinese,
Hindi, Spanish, French, Arabic, Bengali, Portuguese, Russian, Urdu, German, Japanese.
"""

# ruff: noqa: E501, RUF001, SIM905 - wide letters count twice; a long list of words is easier to maintain as one text

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class StatementKind(StrEnum):
    """The kind of a user statement."""

    RULE = "rule"
    REQUEST = "request"
    DECISION = "decision"
    PREFERENCE = "preference"
    FACT = "fact"


# Characters of writing systems that have no spaces between words, or that have vowel signs which `\b` treats as
# ends of words. Phrases in these writing systems match anywhere in a text, even inside a word.
_UNSPACED = "\u0600-\u06ff\u0900-\u0dff\u3040-\u30ff\u3400-\u9fff"
_UNSPACED_LETTER = re.compile(f"[{_UNSPACED}]")
_CHOICE = re.compile(r"\(\?:([^()]*)\)(\??)(?![*+{])")
_LETTER = re.compile(r"\w(?![?*+{])")


@dataclass(frozen=True, slots=True)
class Phrases:
    """A set of words and phrases to search for in a text.

    Attributes:
        pattern: Pattern of all phrases.
        ascii_pattern: Pattern of the phrases that can occur in ASCII text.
    """

    pattern: re.Pattern[str]
    ascii_pattern: re.Pattern[str]

    def search(self, text: str) -> re.Match[str] | None:
        """Returns a match of one of the phrases, not always the longest, or None if there is none."""
        return (self.ascii_pattern if text.isascii() else self.pattern).search(text)


def _expand_choice(phrase: str) -> Iterator[str]:
    """Yields every variant of a phrase that begins with a choice, such as `(?:i|we) need`."""
    choice = _CHOICE.match(phrase)
    if choice is None:
        yield phrase
        return
    for begun in [*choice[1].split("|"), *([""] if choice[2] else [])]:
        yield from _expand_choice(begun + phrase[choice.end() :])


def _build_letter_pattern(phrases: list[str]) -> str:
    """Returns a pattern of phrases grouped by first letter, so that most words are rejected at once."""
    by_letter: defaultdict[str, list[str]] = defaultdict(list)
    for phrase in phrases:
        by_letter[phrase[0] if _LETTER.match(phrase) else ""].append(phrase)
    others = by_letter.pop("", [])
    sorted_ = [f"{letter}(?:{'|'.join(each[1:] for each in some)})" for letter, some in by_letter.items()]
    return "|".join(sorted_ + others)


def _compile_phrases(*alternatives: str) -> Phrases:
    """Compiles phrases separated by ` | `.

    Phrases in writing systems that separate words match only whole words.
    """
    phrases = [phrase for line in alternatives for phrase in line.split(" | ")]
    bare = [phrase for phrase in phrases if _UNSPACED_LETTER.search(phrase)]
    spaced = [
        each for phrase in phrases if not _UNSPACED_LETTER.search(phrase) for each in _expand_choice(phrase)
    ]
    plain = [each for each in spaced if each[0].isascii() or not _LETTER.match(each)]
    whole = [rf"\b(?:{_build_letter_pattern(spaced)})\b"] if spaced else []
    only = rf"\b(?:{_build_letter_pattern(plain)})\b" if plain else "(?!)"
    return Phrases(re.compile("|".join(whole + bare)), re.compile(only))


IMPERATIVES = (
    "add|analy[sz]e|apply|ask|avoid|begin|book|build|bump|call|cancel|change|check|cite|clean|close|commit|"
    "compare|compute|configure|confirm|continue|convert|copy|create|debug|delete|deploy|describe|draft|drop|"
    "edit|email|enable|disable|end|ensure|escalate|evaluate|execute|explain|extend|extract|find|fix|format|"
    "generate|get|give|go|grep|help|implement|improve|include|inspect|install|investigate|keep|kill|limit|"
    "list|look|make|merge|migrate|modify|move|name|open|optimi[sz]e|order|pick|port|prefix|print|pay|"
    "post|propose|provide|publish|pull|push|put|"
    "read|rebase|refund|remind|reserve|reset|restart|refactor|remove|rename|render|replace|reply|report|"
    "rerun|research|respond|restate|restore|"
    "return|revert|review|rewrite|run|save|schedule|search|see|send|set|ship|show|sign|sort|speak|start|"
    "state|stop|submit|"
    "suggest|summari[sz]e|switch|take|tell|test|translate|try|turn|undo|update|upgrade|upload|use|verify|"
    "wait|"
    "walk|wire|work|write"
)
_REPLY_VERBS = "end|start|begin|reply|answer|respond|write|report|format|phrase|cite|sign|speak|keep|use"
_REPLY_NOUNS = (
    "repl(?:y|ies)|answers?|responses?|messages?|numbers?|dates?|times?|measurements?|units?|files?"
)

RULE = _compile_phrases(
    r"never | always | must | must not | mustn't | under no circumstances | at all times | from now on",
    r"going forward | not allowed | forbidden | prohibited | mandatory | off[- ]limits | strictly",
    r"may (?:only|not|never) | only [^,.;]{1,40} may | only (?:if|when|after|with) [^,.;]{1,40} approv\w+",
    r"without (?:\w+ ){0,2}(?:approval|permission|consent|asking) | needs? (?:\w+ )?approval | capped at | nowhere else",
    r"(?:does|do) not move | for the rest of (?:this|the|our) (?:chat|conversation|session) | required to",
    r"nunca | jamás | siempre | debes? | deben | obligatorio | prohibido | a partir de ahora | solo se puede",
    r"bajo ninguna circunstancia | en ningún caso | sin (?:mi )?(?:permiso|autorización|aprobación)",
    r"jamais | toujours | doit | dois | doivent | devez | il faut | interdite? | obligatoire | uniquement",
    r"désormais | dorénavant | en aucun cas | sans (?:mon |ma )?(?:accord|permission|autorisation)",
    r"deve | devem | sempre | obrigatóri[oa] | proibid[oa] | somente | a partir de agora | "
    r"em hipótese alguma",
    r"sem (?:minha )?(?:permissão|autorização|aprovação) | никогда | всегда | нельзя | обязательно | "
    r"должн[аоы]",
    r"должен | запрещен[оа]? | запрещено | ни в коем случае | впредь | отныне | "
    r"без (?:моего )?(?:разрешения|согласия)",
    r"nie | niemals | immer | stets | muss | müssen | musst | darf (?:\w+ )?nicht | dürfen (?:\w+ )?nicht",
    r"verboten | unbedingt | ab jetzt | ab sofort | auf keinen fall | ausschließlich | "
    r"ohne (?:meine )?\w*(?:zustimmung|erlaubnis|genehmigung)",
    "不要 | 不得 | 必须 | 务必 | 禁止 | 绝不 | 绝对不 | 切勿 | 总是 | 始终 | 一律 | 只能 | 不许 | 不准 | 从现在起 | 今后 | 永远不",
    "絶対に | 必ず | しないで | てはいけ | てはなら | 常に | べき | 今後は | 限り | なければな | ないでください",
    "कभी | हमेशा | मत | अनिवार्य | केवल | ज़रूरी है | न करें | अब से | بالضرورة | أبدا | أبدًا | دائما | "
    "دائمًا | يجب | ممنوع",
    "من الآن فصاعد | يُمنع | لا تقم | কখনও | কখনো | সবসময় | অবশ্যই | করবেন না | শুধুমাত্র | নিষিদ্ধ | এখন থেকে",
    "کبھی | ہمیشہ | مت | لازمی | صرف | ضروری ہے | نہ کریں | اب سے",
)
RULE_START = re.compile(
    rf"(?:please,? |and |so |also,? )*(?:(?:do not|don't|dont) (?!worry|know|think|care|mind|forget|you|"
    rf"we|i\b)|avoid \w|"
    rf"(?:{_REPLY_VERBS})\b.{{0,120}}\b(?:every|each|only|always|nothing but|all (?:\w+ )?(?:{_REPLY_NOUNS}))\b|"
    rf"(?:end|start|begin) (?:your|the|all|every|each) (?:{_REPLY_NOUNS})|"
    r"only \w|keep \S+(?: \S+){0,3} (?:away|out|free|private|secret|below|under|above)\b|"
    r"no (?!problem|thank|worries|idea|need|way|one|it|i|the|that|this|we|you|he|she|they|not|but|doubt|"
    r"just)[\w-]+ \w|"
    rf"(?:when|whenever|before|after|each time|every time|if (?:you|any|a|someone|"
    rf"ever)\b) ?.{{3,160}}?, (?:please |always |never |just )?(?:{IMPERATIVES})\b|"
    r"no (?:(?:me|le|lo|la|se|te|nos) )?\w{2,}(?:es|as|áis|éis) |n(?:e |')\S+ (?:\S+ ){0,4}(?:pas|plus|"
    r"rien|aucune?)\b|"
    r"não \w{3,}(?:e|a|em|am|es|as) |не \w+(?:й|йте|ь|ьте|и|ите)\b|только |sólo |solo |somente |seulement |"
    r"nur |keine?n? (?!ahnung|problem|sorge|idee)|لا ت|فقط |"
    r"(?:bitte )?(?:verwende|benutze|nutze|schreib|antworte|lösche|ändere|sende|teile|nenne|"
    r"zeige)\w* .{0,80}\b(?:nicht|kein\w*|nur|jede\w*)\b|"
    r"[请請]?(?:勿|别|只用|只使用|每次)|毎回)"
)
# Statements that sound like rules but are none. "I always loved …" only tells a story. "I think the view
# doesn't keep to what must …" reports a suspected fault of the code and gives the assistant no rule.
NARRATIVE = re.compile(
    r"\b(?:i|i'm|i've|i'd|i'll|we've|we're|we'll|there's|he|he's|she|she's|they|they've|it|it's|that|who|"
    r"there|you've|people|life)\b"
    r"(?: \w+){0,2} (?:never|always)\b(?! (?:want|need|prefer))|\bi must\b|\b(?:it|that|this|you|she|he|"
    r"they|we|there) must"
    r" (?:really |surely )?(?:admit|say|have been|be|feel|know|enjoy)\b|\bmust have\b|\balways (?:been|"
    r"wanted|loved|there|fun|nice|good|great)\b|"
    r"\bnever (?:been|mind|seen|heard|knew|thought|tried|had|ending|forget how|too late)\b|"
    r"\bi (?:think|guess|believe|suspect) (?:that )?(?:the|this|it|its|our|your|my) [^.,;:!]{0,80}"
    r"\b(?:doesn't|does not|don't|do not|isn't|is not|aren't|are not) [^.,;:!]{0,60}\b(?:that|which|what)\b"
    r"(?![^.]{0,300}[,;:!-] (?:and |so |but |please |you |we )*(?:never|do not|don't|must|always)\b)"
)
PREFERENCE = _compile_phrases(
    r"prefers? | preferred | preference | would rather | i'd rather | my favou?rite | "
    r"i like \w+ (?:better|more)",
    r"(?:i|user|we|customer|client) wants? (?:\w+ ){0,3}(?:answers?|repl(?:y|ies)|responses?|examples?|"
    r"measurements?|reports?|units?|code|dates?|times)",
    r"(?:please |kindly )?(?:answer|reply|respond|write|speak) (?:(?:me|code examples|everything) )?in \w+",
    r"prefiero | prefiere | me gustaría más | je préfère | préfère | préférence | prefiro | prefere | "
    r"предпочита\w+",
    r"bevorzug\w+ | am liebsten | lieber | 更喜欢 | 偏好 | 偏爱 | 喜欢 | पसंद | أفضّل | أفضل أن | পছন্দ | ترجیح | "
    r"پسند | 好み | ほうがいい | 方がいい",
)
DECISION = _compile_phrases(
    r"decided | we decide | let's (?:go with|use|stick with) | we'll (?:go with|use) | "
    r"we will (?:go with|use) | i'll go with",
    r"go(?:ing)? with | agreed | settled on | i choose | i chose | approved | we chose | stick with | "
    r"final decision",
    r"decidimos | hemos decidido | vamos a usar | on a décidé | nous avons décidé | on utilise | "
    r"decidi | vamos usar",
    r"решили | решено | выбираем | entschieden | wir nehmen | beschlossen | 决定 | 就用 | 選定 | 决定使用 | "
    r"फैसला | तय किया",
    r"قررنا | قررت | সিদ্ধান্ত | فیصلہ | 決めました | 決定 | にします",
)
REQUEST = _compile_phrases(
    r"please | pls | can you | could you | would you | will you | i need (?:you )?to | we need to | "
    r"i want (?:you )?to",
    r"i'd like (?:you )?to | i would like (?:you )?to | help me | let's | todo | to do | next step | "
    r"next up | current task | i need",
    r"we should | you should | we have to | i'm looking (?:to|for) | make sure | awaiting",
    r"por favor | necesito | puedes | podrías | quiero que | ayúdame | s'il (?:te|vous) plaît | "
    r"peux-tu | pouvez-vous | j'ai besoin",
    r"preciso | pode | poderia | quero que | пожалуйста | нужно | помоги\w* | можешь | bitte | "
    r"kannst du | können sie | ich brauche",
    r"请 | 請 | 帮我 | 能否 | 可以帮 | 我想 | 我需要 | कृपया | मुझे .{0,40}चाहिए | मदद | من فضلك | أريد | ساعدني | "
    r"هل يمكنك",
    r"অনুগ্রহ | দয়া করে | সাহায্য | براہ کرم | مہربانی | مدد | ください | お願い | してほしい",
)
REQUEST_START = re.compile(
    rf"(?:(?:ok|okay|alright|now|then|so|and|also|just|first|next|yes|no|wait|actually|well|sorry|"
    rf"instead|(?:never ?mind|forget|scrap)[^,.]{{0,40}}(?=[,.]))[,.]? )*(?:{IMPERATIVES})\b(?!:)"
)
CORRECTION = _compile_phrases(
    r"instead | no longer | not anymore | any ?more | from now on | actually | "
    r"changed? (?:to|from|my mind) | correction | rather than",
    r"replaces | supersedes | scratch that | i meant | moved to | is now | are now | updated? to | "
    r"switch(?:ed)? to | has changed | now uses?",
    r"en lugar de | en vez de | ya no | a partir de ahora | en realidad | cambió | ahora es | "
    r"au lieu de | ne .{1,30} plus | désormais",
    r"dorénavant | en fait | finalement | em vez de | não mais | a partir de agora | na verdade | "
    r"mudou | agora é | вместо | больше не",
    r"отныне | теперь | на самом деле | statt | stattdessen | anstatt | nicht mehr | ab jetzt | "
    r"ab sofort | eigentlich | doch lieber",
    r"改为 | 改成 | 不再 | 而不是 | 其实 | 更正 | 从现在起 | 代わりに | 変更 | ではなく | 実は | के बजाय | अब से | अब नहीं | "
    r"بدلا من | بدلاً من",
    r"لم يعد | من الآن فصاعد | এর পরিবর্তে | এখন থেকে | আর নয় | کی بجائے | اب سے | اب نہیں",
)
ADDITION = _compile_phrases(
    r"also | too | as well | additionally | in addition | another | besides | furthermore | moreover | "
    r"plus | both",
    r"también | además | aussi | également | en plus | também | além disso | тоже | также | кроме того | "
    r"auch | außerdem | zusätzlich",
    r"也 | 还 | 另外 | 此外 | また | さらに | भी | इसके अलावा | أيضا | أيضًا | بالإضافة | এছাড়া | بھی | اس کے علاوہ",
)
CLOSING = re.compile(
    r"(?:ok|okay|no|ah|oh|actually|well|alright|please)?[,. ]*(?:never ?mind|forget (?:it|that|about)|"
    r"cancel (?:it|that)\b|"
    r"drop (?:it|that)\b|skip (?:it|that)\b|scratch that|that's done|it's done|done\b|all done|no need|"
    r"leave it\b|"
    r"olvídalo|déjalo|ya está|laisse tomber|oublie|c'est fait|esquece|deixa pra lá|забудь|не надо|готово|"
    r"vergiss (?:es|das)|schon gut|erledigt|算了|不用了|完成了|もういい|やっぱりいい|रहने दो|छोड़ो|انس الأمر|لا داعي|"
    r"বাদ দাও|رہنے دو|چھوڑو)"
)
# A message that does nothing but take back what the user said before.
WITHDRAWAL = re.compile(
    r"(?:ok|okay|no|ah|oh|actually|well|alright|please|sorry)?[,. ]*(?:never ?mind|forget (?:it|that|about it|"
    r"about that)|cancel (?:it|that)|drop (?:it|that)|skip (?:it|that)|scratch that|no need|leave it|olvídalo|"
    r"déjalo|laisse tomber|oublie|esquece|deixa pra lá|забудь|не надо|vergiss (?:es|das)|schon gut|算了|不用了|"
    r"もういい|やっぱりいい|रहने दो|छोड़ो|انس الأمر|لا داعي|বাদ দাও|رہنے دو|چھوڑو)"
    r"(?:[,. ]*(?:please|then|thanks|thank you))?[.!。! ]*\Z"
)
# The beginning of a short message that thanks, agrees or says goodbye, and asks for nothing.
THANKS = re.compile(
    r"\W*+(?:(?:ok|okay|no|nope|great|perfect|awesome|wonderful|excellent|nice|alright|good|cool|sure|yes|"
    r"that(?:'s| is| was| looks| sounds)?|it(?:'s| is)?|looks|sounds|works|all|everything|so|very|really|much|"
    r"just|and|i|appreciate|you've been|for now|is)\b[,.! ]*+)*+"
    r"(?:(?:thanks?|thank you|thx|ty|cheers|bye|goodbye|good ?night|stop|quit|exit|that'?s all|that is all|"
    r"that will be all|that'll be all|nothing else|all set|i'm (?:all set|good|done)|perfect|great|lgtm|done|"
    r"appreciate\w*|helpful|gracias|eso es todo|merci|c'est tout|obrigad[oa]|é tudo|é só isso|спасибо|это вс[её]|"
    r"danke\w*|vielen dank|das ist alles|das war'?s|tschüss)(?!\w)|谢谢|多谢|感谢|就这些|ありがとう|以上です|धन्यवाद|शुक्रिया|"
    r"شكرا|شكرًا|ধন্যবাদ|شکریہ)"
)
# Phrases with which an assistant asks a user for something without a question mark.
ASKING_BACK = _compile_phrases(
    r"please (?:\w+ ){0,2}(?:provide|confirm|tell|share|specify|choose|select|send|give|let|check|clarify|"
    r"enter|pick|paste|upload|verify|double|describe|indicate|reply|answer|advise)\w* | let me know | could you | "
    r"would you | can you | kindly | i(?:'ll)? (?:will )?need (?:your|you to|the|some|a few) | por favor | "
    r"podrías | s'il (?:te|vous) plaît | pouvez-vous | preciso (?:de|do|da|que) | poderia | пожалуйста | "
    r"bitte | können sie",
    r"请 | 請 | 麻烦 | ください | 教えて | कृपया | من فضلك | يرجى | অনুগ্রহ | দয়া করে | براہ کرم",
)
# An offer or a polite question at the end of an answer, such as "Anything else?". The work can go on without
# a reply to it.
OFFER = re.compile(
    r"\b(?:anything else|something else|any(?:thing)? (?:other|further|more)|(?:further|more|other|additional) "
    r"(?:\w+ ){0,2}(?:assistance|help|questions?|changes?|requests?|needs?|information)|feel free|let me know if (?:you (?:have|need|want|would like)|there is any\w*|there's any\w*)|"
    r"(?:reach out|ask)(?: again)? if|"
    r"need(?:s)? (?:any |more |further )*(?:help|assistance)|how (?:can|may|else can) i (?:help|assist)|"
    r"what else|happy to (?:help|assist)|here to (?:help|assist)|hesitate|algo más|otra cosa|en qué más|"
    r"autre chose|d'autres|n'hésitez|mais alguma|algo mais|что-(?:то|нибудь) ещ[её]|чем ещ[её]|noch etwas|"
    r"sonst noch|weitere\w* (?:fragen|hilfe)|könnte ich .{0,20}helfen)\b|"
    r"还有(?:什么|其他|别的)|其他(?:问题|需要)|何か(?:他に)?(?:あれば|ご)|他に(?:何か|も)|और कुछ|شيء آخر|آخر"
)
# The beginning of a sentence in which the speaker says what they are going to do.
PROMISE = re.compile(
    r"\W*+(?:(?:ok|okay|alright|great|sure|now|next|then|first|so|and|once .{3,80}?|after .{3,80}?)[,.! ]++)*+"
    r"(?:i will|i'll|i am going to|i'm going to|we will|we'll|next,? i|i still (?:need|have) to|still to do|"
    r"remaining:|i(?:'ll)? (?:then )?plan to|voy a|haré|je vais|je ferai|vou|farei|я (?:сейчас )?(?:сделаю|буду)|"
    r"сейчас я|ich werde|als nächstes|我将|我会|接下来|これから|次に|मैं अब|سأقوم|سوف)(?!\w)"
)
# Words in the status of a request, or in a heading above requests, that call the requests open or done.
OPEN_STATUS = re.compile(
    r"\b(?:open|pending|unresolved|outstanding|unanswered|in progress|not (?:yet )?(?:done|started|finished)|to ?do|"
    r"remaining|next steps?|waiting|blocked|abiert[oa]s?|pendientes?|en curso|ouverte?s?|en cours|en attente|"
    r"em aberto|em andamento|открыт\w*|в работе|offen\w*|ausstehend\w*|in arbeit)\b|"
    r"未完成|待办|待处理|进行中|未解決|未対応|保留|लंबित|مفتوح|معلق|বাকি|زیر التوا"
)
DONE_STATUS = re.compile(
    r"\b(?:done|completed?|finished|resolved|answered|fulfilled|accomplished|hech[oa]s?|complet\w+|terminad[oa]s?|"
    r"faite?s?|terminée?s?|conclu[ií]d[oa]s?|feit[oa]s?|готово|выполнен\w*|завершен\w*|erledigt\w*|fertig\w*|"
    r"abgeschlossen\w*)\b|已完成|已解决|完了|済み|पूर्ण|تم|সম্পন্ন|مکمل"
)
# The beginning of a user message that tells the assistant to carry out its proposal.
APPROVAL = re.compile(
    r"(?:(?:yes|yeah|yep|ok|okay|sure|great|good|please|then|now|and|sí|oui|sim|да|ja)\b[,.! ]*+)*+"
    r"(?:(?:do|try|apply|implement|fix|use) (?:it|that|this|so|them|those|these)\b|"
    r"make (?:it so|(?:it|that|this|those|these|the) (?:changes?|edits?))|go ahead|proceed|continue|go on|hazlo|"
    r"adelante|contin[uú]a|fais[- ]le|vas-y|faça|prossiga|сделай|давай|продолжай|mach (?:das|es|weiter)|weiter)\b|"
    r"做吧|继续|やって|続けて|करो|जारी|افعل|تابع|করো|চালিয়ে|کرو|جاری"
)
# Words that say how something should be.
WISH = re.compile(
    r"\b(?:should|must|needs? to|has to|have to|ought to|debería\w*|debe[ns]?|devrai\w*|doit|doivent|deve[mr]?\w*|"
    r"sollte\w*|muss|müssen|долж\w+|нужно)\b|应该|必须|需要|べき|必要が|चाहिए|يجب|ينبغي|উচিত|চাই|چاہیے"
)
# Words with which a user says, or shows by pasted program output, that the work did not succeed.
FAILURE_REPORT = re.compile(
    r"\b(?:doesn't|does not|didn't|did not|isn't|is not|not|don't|do not) (?:work|working|help|change|apply|conform)\b|"
    r"\bstill (?:not|fails?|failing|broken|wrong|the same|looks?|doesn't|does not|isn't|gets?|getting|there)\b|"
    r"\bthat(?:'s| is) not (?:it|right|what)\b|\bsame (?:error|problem|issue)\b|\bfailed to\b|\bwtf\b|"
    r"\b(?:lint|type|syntax|build|compile|test) (?:errors?|failures?)\b|\b[1-9]\d{0,5} (?:failed|errors?)\b|"
    r"\btraceback \(|\b\w{1,60}(?:error|exception): |"
    r"\bno funciona|\bsigue (?:sin|igual)|\bne (?:marche|fonctionne) pas|\bfunktioniert nicht|\bgeht nicht|"
    r"\bimmer noch|\bnão funciona|\bне работает|还是不|不行|没有用|動かない|動きません|काम नहीं|لا يعمل|কাজ করছে না|کام نہیں"
)
QUESTION = re.compile(
    r"(?:so |and |but |ok,? |hmm+ |wait,? )*(?:what|why|how|who|whom|whose|which|where|when (?:is|are|do|"
    r"did|will)|is|are|was|were|do (?:you|we|i)|"
    r"does|did|has|have (?:you|we)|should (?:i|we)|qué|cómo|por qué|quién|cuál|quel\w*|comment|pourquoi|"
    r"est-ce|como|"
    r"что|как|почему|кто|wie|was|warum|wer|welche\w*)\b"
)
HYPOTHESIS = re.compile(
    r"(?:what if|if|suppose|imagine|maybe|perhaps|wenn|si|se|если|如果|もし|अगर|إذا|যদি|اگر)\b"
)

# Words in a label, such as "RULE:" or "Mes préférences:", and the kind that they give to what follows.
LABELS = {
    StatementKind.RULE: _compile_phrases(
        r"rules? | constraints? | requirements? | polic(?:y|ies) | guardrails? | restrictions? | "
        r"important | reglas? | règles? | contraintes?",
        r"regras? | правил[оа] | regeln? | vorgaben? | 规则 | 規則 | 约束 | ルール | 制約 | नियम | قاعدة | قواعد | "
        r"নিয়ম | اصول",
    ),
    StatementKind.PREFERENCE: _compile_phrases(
        r"prefer\w+ | préférences? | style | 偏好 | 好み | पसंद | تفضيل | পছন্দ | ترجیح | предпочтени\w+ | "
        r"vorlieben?"),
    StatementKind.DECISION: _compile_phrases(
        r"decisions? | decided | decisión | décision | decisão | решение | entscheidung | 决定 | 決定 | "
        r"निर्णय | قرار | সিদ্ধান্ত | فیصلہ"),
    StatementKind.REQUEST: _compile_phrases(
        r"goals? | tasks? | todo | requests? | objectives? | next | tareas? | tâches? | tarefas? | "
        r"задач[аи] | цель | aufgaben? | ziel | 任务 | 目标 | タスク | 目標 | कार्य | مهمة | কাজ | کام"),
}  # fmt: skip
# Labels of lines that programs print, such as "ERROR:". They do not show the kind of a user's statement.
PRINTED = re.compile(
    r"(?:error|err|warn|warning|info|debug|trace|notice|fatal|critical|note|http|stdout|stderr|get|post|"
    r"exit|pass|fail)s?\b"
)

STOP_WORDS = frozenset(
    "a an the this that these those is are was were be been being am it its of to in on at by for from "
    "with as and or but if then so not no "
    "nor any all every each only ever never always must may might can could shall should will would do "
    "does did done don't doesn't isn't "
    "please user users i me my we us our you your they them their he she his her there here now still "
    "just very under circumstances want "
    "wants need needs prefer prefers preferred like likes let use uses used using set who what which "
    "whose when where while until without "
    "than also too instead actually longer into out up off over about have has had get keep stay make "
    "made s t re ll ve d m "
    "el la los las un una unos unas de del en y o que es son por para con se lo su sus mi tu no ni nunca "
    "siempre usar usa le les des du et ou "
    "est sont pour avec dans sur ce cette ne pas jamais toujours au aux der die das ein eine einen ist "
    "sind und oder für mit auf im am zu nie "
    "immer nur nicht os as um uma do da dos das em não e é são и в на с по не что это для из к за от или "
    "как то всегда никогда используй "
    "है हैं का की के को में से और पर कभी हमेशा नहीं من في على إلى هو هي أن لا و یہ ہے میں کا کی کے اور "
    "سے نہیں".split()
)

# Rows of words that mean the same thing in a rule. When statements are compared, the first word of a row
# replaces the others.
THESAURUS = (
    "share disclose reveal expose leak publish divulge",
    "send transmit leave upload transfer export forward email",
    "external outside externally third-party company services service",
    "cap limit budget spending spend maximum max ceiling allowance",
    "exceed exceeding pass surpass overrun",
    "approve approval permission consent sign-off authorize authorise authorization",
    "answer reply respond response replies",
    "delete remove erase drop wipe",
    "deadline due date",
    "base based branched",
    "host hosted lives located run runs running",
    "owner belongs owned responsible",
    "migration migrating migrate",
    "write compose draft",
    "folder directory",
    "customer client",
    "error failure",
)
