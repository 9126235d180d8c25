"""Tiny random models of each family of image-and-text models, with processors, made from their configurations."""

import transformers as t
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from lightning_fcl.mllm.processor import images_only
from lightning_fcl.models.tiny_llava import CHAT_TEMPLATE, make_tokenizer

FAMILIES = ("llava", "llava_next", "llava_onevision", "smolvlm", "qwen2_vl", "qwen2_5_vl")
IMAGE, PATCH, WIDTH = 28, 14, 32
TEXT = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
EXTRA = (
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    "<video>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "<|image_pad|>",
)


def make_family(kind):
    """Model and processor of one family."""
    tokenizer = make_tokenizer(["USER: ASSISTANT:", " ASSISTANT:", " red blue yes no Is it red?"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *EXTRA]})
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<image>", *EXTRA)}
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    model, options, images, template = {
        "llava": _llava,
        "llava_next": _llava_next,
        "llava_onevision": _onevision,
        "smolvlm": _smolvlm,
        "qwen2_vl": _qwen2,
        "qwen2_5_vl": _qwen25,
    }[kind](ids, vocabulary)
    processor = images_only(PROCESSOR_MAPPING_NAMES[kind])(images, tokenizer, chat_template=template, **options)
    return model.eval(), processor


def _clip(**more):
    return t.CLIPVisionConfig(image_size=IMAGE, patch_size=PATCH, **(TEXT | more))


def _llava(ids, vocabulary):
    config = t.LlavaConfig(
        vision_config=_clip(),
        text_config=t.LlamaConfig(**TEXT, **vocabulary),
        image_token_id=ids["<image>"],
        image_seq_length=4,
    )
    images = t.CLIPImageProcessorPil(size={"shortest_edge": IMAGE}, crop_size={"height": IMAGE, "width": IMAGE})
    return t.LlavaForConditionalGeneration(config), _llava_options(), images, CHAT_TEMPLATE


def _llava_options():
    return {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _llava_next(ids, vocabulary):
    grid = [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]]
    config = t.LlavaNextConfig(
        vision_config=_clip(),
        text_config=t.LlamaConfig(**TEXT, **vocabulary),
        image_token_id=ids["<image>"],
        image_grid_pinpoints=grid,
    )
    size = {"height": IMAGE, "width": IMAGE}
    images = t.LlavaNextImageProcessorPil(size={"shortest_edge": IMAGE}, crop_size=size, image_grid_pinpoints=grid)
    return t.LlavaNextForConditionalGeneration(config), _llava_options(), images, CHAT_TEMPLATE


def _onevision(ids, vocabulary):
    grid = [[IMAGE, IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]]
    config = t.LlavaOnevisionConfig(
        vision_config=t.SiglipVisionConfig(image_size=IMAGE, patch_size=PATCH, vision_use_head=False, **TEXT),
        text_config=t.Qwen2Config(**TEXT, **vocabulary, num_key_value_heads=2),
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
        image_grid_pinpoints=grid,
        vision_feature_select_strategy="full",
    )
    images = t.LlavaOnevisionImageProcessorPil(size={"height": IMAGE, "width": IMAGE}, image_grid_pinpoints=grid)
    options = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    return t.LlavaOnevisionForConditionalGeneration(config), options, images, CHAT_TEMPLATE


def _smolvlm(ids, vocabulary):
    config = t.SmolVLMConfig(
        vision_config={"image_size": IMAGE, "patch_size": PATCH, "model_type": "smolvlm_vision", **TEXT},
        text_config=t.LlamaConfig(**TEXT, **vocabulary),
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=1,
    )
    images = t.SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * IMAGE}, max_image_size={"longest_edge": IMAGE}, do_image_splitting=True
    )
    return t.SmolVLMForConditionalGeneration(config), {"image_seq_len": 1}, images, CHAT_TEMPLATE


def _qwen2(ids, vocabulary, kind="Qwen2VL", **vision):
    vision = {"depth": 2, "embed_dim": WIDTH, "num_heads": 2, "hidden_size": WIDTH, "patch_size": PATCH} | vision
    config = getattr(t, f"{kind}Config")(
        vision_config=vision,
        text_config=TEXT | vocabulary | {"num_key_value_heads": 2, "rope_parameters": ROPE},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    images = t.Qwen2VLImageProcessorPil(patch_size=PATCH, size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    template = CHAT_TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    return getattr(t, f"{kind}ForConditionalGeneration")(config), {}, images, template


def _qwen25(ids, vocabulary):
    return _qwen2(
        ids,
        vocabulary,
        kind="Qwen2_5_VL",
        out_hidden_size=WIDTH,
        intermediate_size=48,
        window_size=28 * 2,
        fullatt_block_indexes=[1],
    )
