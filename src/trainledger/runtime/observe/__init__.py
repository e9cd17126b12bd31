"""Observers: what a run really held, sent, computed and waited for. They know lines and torch, and no formula."""
