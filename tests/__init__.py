"""Tests of ckptctl."""
