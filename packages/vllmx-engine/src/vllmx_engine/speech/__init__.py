"""Transcriptions: windows of audio to requests, answers to segments."""
