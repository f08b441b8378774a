package main

import (
	"fmt"
	"math"
	"time"

	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/internal/settings"
)

// limitsFlags are the same as the command line writes them.
type limitsFlags struct {
	connections, anonymous  settings.Value[int]
	perSource               int
	age, idle               time.Duration
	streams, inFlight       settings.Value[int]
	message, unread, header settings.Value[int64]
	write, firstMessage     time.Duration
}

func (f *limitsFlags) register(fs *pflag.FlagSet) {
	fs.Var(f.connections.Of(settings.ParseCount(0, math.MaxInt32), "int", settings.Auto), "max-connections", "connections of authenticated callers at a time at each port; more are closed; 0: no bound; auto: by the memory there is")
	fs.IntVar(&f.perSource, "max-connections-per-source", 0, "those of them from one source, an IPv4 address or an IPv6 /64; 0: half of --max-connections")
	fs.Var(f.anonymous.Of(settings.ParseCount(1, math.MaxInt32), "int", settings.Auto), "max-anonymous-connections", "connections at a time at each port whose callers have not been authenticated yet; more wait, and sources take turns; auto: by the memory there is")
	fs.DurationVar(&f.age, "max-connection-age", node.DefaultMaxAge, "age from which a caller or node is asked to take another connection; set it below half of what short-lived client certificates live; 0: no bound")
	fs.DurationVar(&f.idle, "idle-timeout", node.DefaultIdleTimeout, "how long a connection of gRPC or the Redis protocol may stay without calls; 0: no bound")
	fs.Var(f.streams.Of(settings.ParseCount(1, 1_000_000), "int", settings.Auto), "max-streams", "calls at a time on one connection of gRPC or HTTP/2; more wait at the caller; auto: by the memory there is")
	fs.Var(f.message.Of(settings.AutoOr(settings.ParseSize(1<<10, 1<<30)), "size", settings.Auto), "max-message-size", "largest body of a request, HTTP or gRPC; auto: 4MiB, or less where there is little memory")
	fs.Var(f.header.Of(settings.ParseSize(1<<10, 1<<20), "size", "32KiB"), "max-header-size", "largest header of a request, HTTP or gRPC")
	fs.Var(f.inFlight.Of(settings.ParseCount(1, math.MaxInt32), "int", settings.Auto), "max-in-flight", "checks that wait at a time for other nodes or for copies; more are answered by on_error; auto: by the memory there is")
	fs.DurationVar(&f.firstMessage, "first-message-timeout", node.DefaultFirstMessage, "longest time between the headers and the first message of a gRPC call, and for a command of the Redis protocol to come")
	fs.DurationVar(&f.write, "write-timeout", node.DefaultWriteTimeout, "longest time that a gRPC connection, or a stream on it, may be stuck because its caller does not read")
	fs.Var(f.unread.Of(settings.AutoOr(settings.ParseSize(1<<20, 1<<40)), "size", settings.Auto), "max-unread", "answers of all streams of checks that wait for their callers to read; streams with more than their share of it are ended then; auto: by the memory there is")
}

// config is what the flags say.
func (f *limitsFlags) config() (node.Limits, error) {
	c := node.Limits{
		MaxPerSource: f.perSource, MaxAnonymous: f.anonymous.Value, MaxAge: f.age, IdleTimeout: f.idle,
		MaxConnections: f.connections.Value, MaxStreams: f.streams.Value, MaxMessage: f.message.Value, MaxHeader: f.header.Value,
		FirstMessage: f.firstMessage, WriteTimeout: f.write, MaxInFlight: f.inFlight.Value, MaxUnread: f.unread.Value,
	}
	if f.connections.Text == "0" {
		c.MaxConnections = -1
	}
	if f.perSource < 0 {
		return c, fmt.Errorf("max-connections-per-source: %d is negative", f.perSource)
	}
	for _, bound := range []struct {
		flag string
		d    *time.Duration
	}{{"max-connection-age", &c.MaxAge}, {"idle-timeout", &c.IdleTimeout}} {
		if *bound.d != 0 && *bound.d < time.Second {
			return c, fmt.Errorf("%s: %v is too short: give a second or more, or 0 for no bound", bound.flag, *bound.d)
		}
		if *bound.d == 0 {
			*bound.d = -1
		}
	}
	if f.firstMessage < 100*time.Millisecond {
		return c, fmt.Errorf("first-message-timeout: %v is too short; a slow network needs some seconds", f.firstMessage)
	}
	if f.write < 100*time.Millisecond {
		return c, fmt.Errorf("write-timeout: %v is too short; a slow network needs some seconds", f.write)
	}
	return c, nil
}
