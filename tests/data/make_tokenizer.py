"""Makes tests/data/tokenizer: a tokenizer of a few words, with special tokens and a chat template."""

import pathlib

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = "<unk> <s> </s> <user> <assistant> what is two plus ? four the answer .".split()
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no such role: ' + m['role']) }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words,
    unk_token="<unk>",
    bos_token="<s>",
    eos_token="</s>",
    additional_special_tokens=["<user>", "<assistant>"],
)
tokenizer.chat_template = CHAT_TEMPLATE
tokenizer.save_pretrained(pathlib.Path(__file__).parent / "tokenizer")
