package cluster

import (
	"bytes"
	"context"
	"log"
	"log/slog"
	"strings"
	"sync"
)

// gossipLog passes the library's lines on to slog, for debugging. What the library calls an error is mostly the
// ordinary noise of a network with nodes that come and go, and what an operator should know of it the owner of the
// state logs itself. Only that UDP is blocked nobody else notices: the first line of that is a warning.
type gossipLog struct {
	logger     *slog.Logger
	unreadable func() // is told of what cannot be decrypted, which the library says nowhere else
	warn       sync.Once
}

func newGossipLog(logger *slog.Logger, unreadable func()) *gossipLog {
	return &gossipLog{logger: logger, unreadable: unreadable}
}

// standard returns the logger that the library takes.
func (g *gossipLog) standard() *log.Logger { return log.New(g, "", 0) }

// Write takes one line, such as "[WARN] memberlist: Refuting a suspect message (from: a)".
func (g *gossipLog) Write(line []byte) (int, error) {
	text := string(bytes.TrimSpace(line))
	if _, message, found := strings.Cut(text, "memberlist: "); found {
		text = message
	}
	if strings.Contains(text, "no installed keys could decrypt") || strings.Contains(text, "is not encrypted") ||
		strings.Contains(text, "Decrypt packet failed") {
		g.unreadable()
	}
	level := slog.LevelDebug
	if strings.Contains(text, "UDP probes failed") {
		g.warn.Do(func() { level = slog.LevelWarn })
	}
	g.logger.Log(context.Background(), level, "gossip: "+text)
	return len(line), nil
}
