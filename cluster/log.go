package cluster

import (
	"bytes"
	"context"
	"log"
	"log/slog"
	"strings"
	"sync"
)

// gossipLog passes the library's lines on to slog. What the library calls an error is mostly the ordinary noise of a
// network with nodes that come and go, and what an operator should know of it the owner of the state logs itself.
type gossipLog struct {
	logger     *slog.Logger
	unreadable func() // is told of what cannot be decrypted, which the library says nowhere else

	mu   sync.Mutex
	seen map[string]bool // warnings passed on since the last forget
}

func newGossipLog(logger *slog.Logger, unreadable func()) *gossipLog {
	return &gossipLog{logger: logger, unreadable: unreadable, seen: map[string]bool{}}
}

// standard returns the logger that the library takes.
func (g *gossipLog) standard() *log.Logger { return log.New(g, "", 0) }

// Write takes one line, such as "[WARN] memberlist: Refuting a suspect message (from: a)".
func (g *gossipLog) Write(line []byte) (int, error) {
	text := string(bytes.TrimSpace(line))
	level := slog.LevelDebug
	if rest, found := strings.CutPrefix(text, "["); found {
		name, message, _ := strings.Cut(rest, "]")
		if name == "WARN" || name == "ERR" || name == "ERROR" {
			level = slog.LevelWarn
		}
		text = message
	}
	text = strings.TrimPrefix(strings.TrimSpace(text), "memberlist: ")
	if strings.Contains(text, "no installed keys could decrypt") || strings.Contains(text, "is not encrypted") ||
		strings.Contains(text, "Decrypt packet failed") {
		g.unreadable()
	}
	if level == slog.LevelWarn && (expected(text) || g.repeated(text)) {
		level = slog.LevelDebug
	}
	g.logger.Log(context.Background(), level, "gossip: "+text)
	return len(line), nil
}

// expected reports whether a warning is logged elsewhere, or is what a crash, a restart or a leave looks like.
func expected(text string) bool {
	for _, prefix := range []string{
		"ignoring alive message",       // logged as a refusal
		"Got ping for unexpected node", // meant for our predecessor
		"Failed to send",               // the peer has gone
		"Failed fallback",
		"Push/Pull with",
	} {
		if strings.HasPrefix(text, prefix) {
			return true
		}
	}
	return false
}

// repeated reports whether such a warning, but for its details, has been passed on already.
func (g *gossipLog) repeated(text string) bool {
	kind := text
	if i := strings.IndexAny(text, ":('\""); i > 0 {
		kind = text[:i]
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.seen[kind] {
		return true
	}
	g.seen[kind] = true
	return false
}

// forget lets warnings pass again. It is called every minute.
func (g *gossipLog) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.seen)
}
