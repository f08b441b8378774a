package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

const (
	respCallers = 16  // connections
	respBatch   = 100 // commands that are sent together
)

// respCommand is a command of the Redis protocol, as it is measured: send appends one for a key, whose reply has so many lines.
type respCommand struct {
	send  func(b []byte, key string, n int) []byte
	lines int
}

// appendCommand appends a command as clients send it.
func appendCommand(b []byte, args ...string) []byte {
	b = append(strconv.AppendInt(append(b, '*'), int64(len(args)), 10), '\r', '\n')
	for _, a := range args {
		b = append(strconv.AppendInt(append(b, '$'), int64(len(a)), 10), '\r', '\n')
		b = append(append(b, a...), '\r', '\n')
	}
	return b
}

// respCaller returns callers with a connection each, on which commands are sent respBatch at a time, the next when all are answered.
// Answers are counted and not parsed, so that the caller, who shares the machine, takes as little of it as can be.
func respCaller(address string, command respCommand, pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		var conn net.Conn
		var out []byte
		in := make([]byte, 64<<10)
		n := 0
		ask := func(ctx context.Context) (int, error) {
			if conn == nil {
				var err error
				if conn, err = openTCP(ctx, address); err != nil {
					return 0, err
				}
			}
			out = out[:0]
			for range respBatch {
				n++
				out = command.send(out, pick(random), i<<32+n)
			}
			if _, err := conn.Write(out); err != nil {
				return 0, err
			}
			for lines := respBatch * command.lines; lines > 0; {
				got, err := conn.Read(in)
				if err != nil {
					return 0, err
				}
				if in[0] == '-' || bytes.Contains(in[:got], []byte("\n-")) {
					return 0, fmt.Errorf("answered %.100q", in[:got])
				}
				if lines -= bytes.Count(in[:got], []byte{'\n'}); lines < 0 {
					return 0, errors.New("more was answered than asked")
				}
			}
			return respBatch, nil
		}
		return loop(ask)
	}
}

// respMeasurements compare commands of the Redis protocol that come a hundred at a time.
func (b *bench) respMeasurements() []measurement {
	const work = "resp"
	redis := func(command func(r *redisServer) respCommand) func(context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			r, err := b.redis()
			if err != nil {
				return nil, err
			}
			return b.load(respCallers, r.server).drive(ctx, respCaller(r.address, command(r), b.anyKey))
		}
	}
	weir := func(command respCommand) func(context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			w, err := b.weirOne()
			if err != nil {
				return nil, err
			}
			return b.load(respCallers, w.servers...).drive(ctx, respCaller(w.nodes[0].resp, command, b.anyKey))
		}
	}
	limit, window := strconv.Itoa(limitUnits), strconv.FormatInt(limitWindow.Microseconds(), 10)
	burst, seconds := strconv.Itoa(limitUnits-1), strconv.Itoa(int(limitWindow.Seconds()))
	return []measurement{
		{work: work, system: "redis-ping", run: redis(func(*redisServer) respCommand {
			return respCommand{func(b []byte, _ string, _ int) []byte { return append(b, "*1\r\n$4\r\nPING\r\n"...) }, 1}
		})},
		{work: work, system: "redis-script", run: redis(func(r *redisServer) respCommand {
			sha := r.script.Hash()
			return respCommand{func(b []byte, key string, n int) []byte {
				return appendCommand(b, "EVALSHA", sha, "1", key, limit, window, strconv.Itoa(n))
			}, 1}
		})},
		{work: work, system: "weir-throttle", run: weir(respCommand{func(b []byte, key string, _ int) []byte {
			return appendCommand(b, "CL.THROTTLE", key, burst, limit, seconds)
		}, 6})},
		{work: work, system: "weir-check", run: weir(respCommand{func(b []byte, key string, _ int) []byte {
			return appendCommand(b, "WEIR.CHECK", "bucket", key)
		}, 34})},
	}
}
