"""Multimodal LLMs: any LLaVA-like model of transformers as a LightningModule, tuned by LoRA on visual instructions."""

from lightning_fcl.mllm.collate import InstructionCollator as InstructionCollator
from lightning_fcl.mllm.events import EventInstructionModule as EventInstructionModule
from lightning_fcl.mllm.likelihood import answer_log_likelihood as answer_log_likelihood
from lightning_fcl.mllm.lora import LoRA as LoRA
from lightning_fcl.mllm.module import MultimodalInstructionModule as MultimodalInstructionModule
from lightning_fcl.mllm.module import instruction_module as instruction_module
from lightning_fcl.mllm.processor import load_processor as load_processor
from lightning_fcl.mllm.questions import QuestionEmbeddings as QuestionEmbeddings
