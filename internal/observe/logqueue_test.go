package observe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// gate is a writer that stalls while it is shut.
type gate struct {
	open chan struct{}
	buf  bytes.Buffer
	err  error
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	if g.err != nil {
		return 0, g.err
	}
	return g.buf.Write(p)
}

func opened() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// TestOrder: what is written arrives as it was, in order, although its buffer is used again.
func TestOrder(t *testing.T) {
	g := &gate{open: opened()}
	q := NewLogQueue(g, LogQueueConfig{MaxBytes: 1 << 20})
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
	expect.Equal(t, g.buf.String(), want.String(), "%d bytes written, want %d", g.buf.Len(), want.Len())
	_, err = q.Write([]byte("late"))
	expect.True(t, errors.Is(err, ErrClosed) && q.Dropped() == 1, "after the end: %v, %d dropped", err, q.Dropped())
}

// TestStall: nobody waits for a writer that stalls, no more than the bound is kept, and how much was dropped is told once it works
// again, after what was queued.
func TestStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{open: make(chan struct{})}
		told := make(chan uint64, 10)
		q := NewLogQueue(g, LogQueueConfig{MaxBytes: 100, OnDropped: func(n uint64) { told <- n }})
		for i := range 50 {
			_, err := q.Write([]byte("0123456789"))
			want := i >= 10
			expect.True(t, (err != nil) == want && (!want || errors.Is(err, ErrFull)), "line %d: %v", i, err)
			synctest.Wait()
		}
		expect.True(t, q.Dropped() == 40 && len(told) == 0, "%d dropped, told %d times", q.Dropped(), len(told))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		close(g.open)
		synctest.Wait()
		expect.True(t, len(told) == 1 && <-told == 40 && g.buf.Len() == 100,
			"told %d times, %d bytes written", len(told), g.buf.Len())
		expect.NoError(t, q.Close(ctx))
	})
}

// TestCloseIsBounded: a writer that never returns does not hold up the end.
func TestCloseIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{open: make(chan struct{})}
		defer close(g.open)
		q := NewLogQueue(g, LogQueueConfig{MaxBytes: 100})
		_, err := q.Write([]byte("a"))
		must.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		before := time.Now()
		if err := q.Close(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(before) != time.Second {
			t.Errorf("%v after %v", err, time.Since(before))
		}
	})
}

// TestWriteThrough: a line has been written when the call returns. Of those who find the writer stalled the first one waits, until
// it works again.
func TestWriteThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{open: opened()}
		q := NewLogQueue(g, LogQueueConfig{MaxBytes: 100, Wait: time.Second})
		through := func(wait time.Duration) {
			t.Helper()
			before := time.Now()
			if n, err := q.WriteThrough([]byte("a")); n != 1 || err != nil || time.Since(before) != wait {
				t.Errorf("%d, %v after %v, want %v", n, err, time.Since(before), wait)
			}
		}
		through(0)
		expect.True(t, g.buf.Len() == 1, "not written yet")
		g.open = make(chan struct{})
		through(time.Second)
		through(0)
		through(0)
		close(g.open)
		synctest.Wait()
		expect.Equal(t, g.buf.Len(), 4, "written of 4")
		g.open = make(chan struct{})
		through(time.Second)
		close(g.open)
		err := q.Close(t.Context())
		expect.True(t, err == nil && q.Dropped() == 0, "%v, %d dropped", err, q.Dropped())
	})
}

// TestWriteErrors: a line that cannot be written is counted, and nobody is told, who would write about it.
func TestWriteErrors(t *testing.T) {
	g := &gate{open: opened(), err: errors.New("no space left")}
	q := NewLogQueue(g, LogQueueConfig{MaxBytes: 100, Wait: time.Minute, OnDropped: func(uint64) { t.Error("told") }})
	for range 3 {
		_, err := q.WriteThrough([]byte("a"))
		expect.NoError(t, err)
	}
	err := q.Close(t.Context())
	expect.True(t, err == nil && q.Dropped() == 3, "%v, %d dropped", err, q.Dropped())
}
