package main

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/internal/node"
)

// limitsFlags are the same as the command line writes them.
type limitsFlags struct {
	connections, anonymous  parsed[int]
	perSource               int
	age, idle               time.Duration
	streams, inFlight       parsed[int]
	message, unread, header parsed[int64]
	write, firstMessage     time.Duration
}

func (f *limitsFlags) register(fs *pflag.FlagSet) {
	fs.Var(f.connections.by(parseCount(0, math.MaxInt32), "int", auto), "max-connections", "connections of authenticated callers at a time at each port; more are closed; 0: no bound; auto: by the memory there is")
	fs.IntVar(&f.perSource, "max-connections-per-source", 0, "those of them from one source, an IPv4 address or an IPv6 /64; 0: half of --max-connections")
	fs.Var(f.anonymous.by(parseCount(1, math.MaxInt32), "int", auto), "max-anonymous-connections", "connections at a time at each port whose callers have not been authenticated yet; more wait, and sources take turns; auto: by the memory there is")
	fs.DurationVar(&f.age, "max-connection-age", node.DefaultMaxAge, "age from which a caller or node is asked to take another connection; set it below half of what short-lived client certificates live; 0: no bound")
	fs.DurationVar(&f.idle, "idle-timeout", node.DefaultIdleTimeout, "how long a connection of gRPC or the Redis protocol may stay without calls; 0: no bound")
	fs.Var(f.streams.by(parseCount(1, 1_000_000), "int", auto), "max-streams", "calls at a time on one connection of gRPC or HTTP/2; more wait at the caller; auto: by the memory there is")
	fs.Var(f.message.by(autoOr(parseSize(1<<10, 1<<30)), "size", auto), "max-message-size", "largest body of a request, HTTP or gRPC; auto: 4MiB, or less where there is little memory")
	fs.Var(f.header.by(parseSize(1<<10, 1<<20), "size", "32KiB"), "max-header-size", "largest header of a request, HTTP or gRPC")
	fs.Var(f.inFlight.by(parseCount(1, math.MaxInt32), "int", auto), "max-in-flight", "checks that wait at a time for other nodes or for copies; more are answered by on_error; auto: by the memory there is")
	fs.DurationVar(&f.firstMessage, "first-message-timeout", node.DefaultFirstMessage, "longest time between the headers and the first message of a gRPC call, and for a command of the Redis protocol to come")
	fs.DurationVar(&f.write, "write-timeout", node.DefaultWriteTimeout, "longest time that a gRPC connection, or a stream on it, may be stuck because its caller does not read")
	fs.Var(f.unread.by(autoOr(parseSize(1<<20, 1<<40)), "size", auto), "max-unread", "answers of all streams of checks that wait for their callers to read; streams with more than their share of it are ended then; auto: by the memory there is")
}

// config is what the flags say.
func (f *limitsFlags) config() (node.Limits, error) {
	c := node.Limits{
		MaxPerSource: f.perSource, MaxAnonymous: f.anonymous.value, MaxAge: f.age, IdleTimeout: f.idle,
		MaxConnections: f.connections.value, MaxStreams: f.streams.value, MaxMessage: f.message.value, MaxHeader: f.header.value,
		FirstMessage: f.firstMessage, WriteTimeout: f.write, MaxInFlight: f.inFlight.value, MaxUnread: f.unread.value,
	}
	if f.connections.text == "0" {
		c.MaxConnections = -1
	}
	if f.perSource < 0 {
		return c, fmt.Errorf("--max-connections-per-source: %d is negative", f.perSource)
	}
	for _, bound := range []struct {
		flag string
		d    *time.Duration
	}{{"--max-connection-age", &c.MaxAge}, {"--idle-timeout", &c.IdleTimeout}} {
		if *bound.d != 0 && *bound.d < time.Second {
			return c, fmt.Errorf("%s: %v is too short: give a second or more, or 0 for no bound", bound.flag, *bound.d)
		}
		if *bound.d == 0 {
			*bound.d = -1
		}
	}
	if f.firstMessage < 100*time.Millisecond {
		return c, fmt.Errorf("--first-message-timeout: %v is too short; a slow network needs some seconds", f.firstMessage)
	}
	if f.write < 100*time.Millisecond {
		return c, fmt.Errorf("--write-timeout: %v is too short; a slow network needs some seconds", f.write)
	}
	return c, nil
}

// auto is the value of a setting that follows from the memory there is.
const auto = "auto"

// autoOr returns a parser that reads auto as 0, and leaves the rest to another.
func autoOr[T any](parse func(string) (T, error)) func(string) (T, error) {
	return func(s string) (value T, err error) {
		if s == auto {
			return value, nil
		}
		return parse(s)
	}
}

// parseCount returns a parser of numbers within bounds, and of auto, which is 0.
func parseCount(least, most int) func(string) (int, error) {
	return autoOr(func(s string) (int, error) {
		n, err := strconv.Atoi(s)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%q is neither auto nor a number from %d to %d", s, least, most)
		}
		return n, nil
	})
}

// parseSize returns a parser of amounts of memory within bounds.
func parseSize(least, most uint64) func(string) (int64, error) {
	return func(s string) (int64, error) {
		n, err := humanize.ParseBytes(s)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%q is not a size from %s to %s", s, humanize.IBytes(least), humanize.IBytes(most))
		}
		return int64(n), nil
	}
}
