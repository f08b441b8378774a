package observe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// buffer is a bytes.Buffer for several goroutines, which can be made to fail.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
	err error
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil {
		return 0, b.err
	}
	return b.buf.Write(p)
}

// lines are those written so far.
func (b *buffer) lines(t *testing.T) (lines []map[string]any) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for line := range strings.Lines(b.buf.String()) {
		var fields map[string]any
		must.NoError(t, json.Unmarshal([]byte(line), &fields), "%q", line)
		lines = append(lines, fields)
	}
	return lines
}

func open(t *testing.T, name string, out *buffer) *AuditLog {
	t.Helper()
	return must.Value(OpenAudit(AuditConfig{Name: name, Stderr: out, Now: time.Now, MaxQueued: 1 << 20,
		OnError: func(err error) { t.Log(err) }}))(t)
}

// TestLines: a line says who, what and from where, and no more than is known.
func TestLines(t *testing.T) {
	var out buffer
	l := open(t, AuditStderr, &out)
	from := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 99}
	l.Record(auth.Event{
		Action: auth.ActionRefund, Listener: "http", Caller: "support", Credential: "token", From: from,
		Target: limit.Target{Policy: "login", Key: "al\nice"}, Units: 5, Result: 3,
	})
	l.Record(auth.Event{Action: auth.ActionReset, Listener: "grpc", Caller: "support", Credential: "certificate",
		Identities: "cn:x", Target: limit.Target{Policy: strings.Repeat("p", 5000), Key: "k"}, Err: errors.New("no")})
	l.Record(auth.Event{Action: auth.ActionDenied, Listener: "http", Credential: "none", From: from,
		Reason: "no_credentials", What: "authenticate"})
	expect.NoError(t, l.Close())
	l.Record(auth.Event{Action: auth.ActionReset})
	lines := out.lines(t)
	must.Equal(t, len(lines), 3, "%v", lines)
	for i, want := range []map[string]any{
		{"msg": "refund", "caller": "support", "credential": "token", "listener": "http", "from": "192.0.2.1:99",
			"policy": "login", "key": "al\nice", "units": 5.0, "refunded": 3.0},
		{"msg": "reset", "caller": "support", "credential": "certificate", "identities": "cn:x", "listener": "grpc",
			"policy": strings.Repeat("p", maxText), "key": "k", "error": "no"},
		{"msg": "denied", "caller": "", "credential": "none", "listener": "http", "from": "192.0.2.1:99",
			"reason": "no_credentials", "what": "authenticate"},
	} {
		_, ok := lines[i]["time"]
		expect.True(t, ok, "%v has no time", lines[i])
		delete(lines[i], "time")
		delete(lines[i], "level")
		expect.Equal(t, len(lines[i]), len(want), "%v\nwant %v", lines[i], want)
		for name, value := range want {
			expect.Equal(t, lines[i][name], value, "%s", name)
		}
	}
}

// TestDeniedAreBounded: of a flood of denied calls some lines are written, and a count of the others; refunds all are.
func TestDeniedAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out buffer
		l := open(t, AuditStderr, &out)
		const flood = 10_000
		for i := range flood {
			l.Record(auth.Event{Action: auth.ActionDenied})
			if i%100 == 0 {
				l.Record(auth.Event{Action: auth.ActionRefund})
			}
		}
		expect.Equal(t, len(out.lines(t)), burst+flood/100, "lines")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		lines := out.lines(t)
		last := lines[len(lines)-1]
		expect.True(t, last["msg"] == "denied calls omitted" && last["count"] == float64(flood-burst), "%v", last)
		for range flood {
			l.Record(auth.Event{Action: auth.ActionDenied})
		}
		expect.NoError(t, l.Close()) // which says it, too
		lines = out.lines(t)
		last = lines[len(lines)-1]
		expect.True(t, last["count"] == float64(flood-2*perSecond), "%v", last)
	})
}

// TestFile: the file is appended to, readable by its owner only, and opened anew once it has been moved away.
func TestFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "audit.log")
	count := func(name string) int {
		data := must.Value(os.ReadFile(name))(t)
		return strings.Count(string(data), "\n")
	}
	for range 2 {
		l := open(t, name, nil)
		l.Record(auth.Event{Action: auth.ActionReset})
		expect.NoError(t, l.Close())
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 || count(name) != 2 {
		t.Errorf("%v, %v, %d lines", info, err, count(name))
	}
	l := open(t, name, nil)
	must.NoError(t, os.Rename(name, name+".1"))
	l.Record(auth.Event{Action: auth.ActionReset})
	expect.NoError(t, l.Reopen())
	l.Record(auth.Event{Action: auth.ActionReset})
	expect.NoError(t, l.Close())
	expect.True(t, count(name+".1") == 3 && count(name) == 1, "%d lines, and %d", count(name+".1"), count(name))
	_, err := OpenAudit(AuditConfig{Name: filepath.Join(name, "x")})
	expect.True(t, err != nil, "a file in a file")
}

// stuck is a writer that stalls until it is let go.
type stuck struct {
	buffer
	let chan struct{}
}

func (s *stuck) Write(p []byte) (int, error) {
	<-s.let
	return s.buffer.Write(p)
}

// TestAuditStall: a destination that stalls costs one caller a second, whoever comes after it nothing, and the end
// another second; once it works again the lines that were queued are written.
func TestAuditStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &stuck{let: make(chan struct{})}
		l := must.Value(OpenAudit(AuditConfig{Name: AuditStderr, Stderr: out, Now: time.Now, MaxQueued: 2000,
			OnError: func(err error) { t.Error(err) }}))(t)
		before := time.Now()
		for range 100 {
			l.Record(auth.Event{Action: auth.ActionReset, Target: limit.Target{Policy: "login", Key: "alice"}})
		}
		expect.Equal(t, time.Since(before), patience, "100 events took")
		missing := l.Dropped()
		expect.True(t, missing >= 80 && missing <= 99, "%d dropped", missing)
		close(out.let)
		synctest.Wait()
		lines := out.lines(t)
		expect.True(t, len(lines) == 100-int(missing), "%d lines, %d dropped", len(lines), missing)

		out.let = make(chan struct{})
		defer close(out.let)
		l.Record(auth.Event{Action: auth.ActionReset})
		before = time.Now()
		if err := l.Close(); !errors.Is(err, context.DeadlineExceeded) || time.Since(before) != patience {
			t.Errorf("%v after %v", err, time.Since(before))
		}
	})
}

// TestAuditWriteErrors: the first line that cannot be written is reported, and the first after one that could.
func TestAuditWriteErrors(t *testing.T) {
	out := &buffer{err: errors.New("full")}
	reported := 0
	l := must.Value(OpenAudit(AuditConfig{Name: AuditStderr, Stderr: out, Now: time.Now, MaxQueued: 1 << 20,
		OnError: func(error) { reported++ }}))(t)
	reset := auth.Event{Action: auth.ActionReset}
	for _, c := range []struct {
		err  error
		want int
	}{{out.err, 1}, {out.err, 1}, {nil, 1}, {out.err, 2}} {
		out.err = c.err
		l.Record(reset)
		expect.True(t, reported == c.want, "%d reports, want %d", reported, c.want)
	}
}

// TestOrder: what is written arrives as it was, in order, although its buffer is used again.
func TestOrder(t *testing.T) {
	var out bytes.Buffer
	q := NewLogQueue(&out, 1<<20)
	var want strings.Builder
	line := make([]byte, 0, 16)
	for i := range 1000 {
		line = fmt.Appendf(line[:0], "%d\n", i)
		want.Write(line)
		n, err := q.Write(line)
		must.True(t, n == len(line) && err == nil, "%v %v", n, err)
	}
	err := q.Close(t.Context())
	expect.True(t, err == nil && q.Dropped() == 0, "%v, %d dropped", err, q.Dropped())
	expect.Equal(t, out.String(), want.String(), "%d bytes written, want %d", out.Len(), want.Len())
	_, err = q.Write([]byte("late"))
	expect.True(t, errors.Is(err, ErrClosed) && q.Dropped() == 1, "after the end: %v, %d dropped", err, q.Dropped())
}
