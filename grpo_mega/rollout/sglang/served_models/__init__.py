"""The models of the supported families, for SGLANG_EXTERNAL_MODEL_PACKAGE.

SGLang reads them from `EntryClass` of each module here and imports other models only on demand. Without this package it
imports about 240 modules.
"""
