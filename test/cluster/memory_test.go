package clustertest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestMemoryBound floods nodes with default flags in control groups with a limit of memory, each in its own: keys,
// streams, answers that nobody reads, the longest keys, halves of messages, and all at once. The flooded node is not
// killed for its size, answers others meanwhile, and is as before within recoverWithin.
func TestMemoryBound(t *testing.T) {
	needsQuiet(t)
	if raceEnabled {
		t.Skip("the race detector takes up to ten times the memory")
	}
	sizes := []int64{256 << 20, 512 << 20}
	if os.Getenv("WEIR_TEST_MEMORY_2GIB") != "" {
		sizes = append(sizes, 2<<30)
	}
	for _, size := range sizes {
		t.Run(fmt.Sprintf("%dMiB", size>>20), func(t *testing.T) { testMemoryBound(t, size) })
	}
}

const (
	recoverWithin = 5 * time.Second
	floodFor      = 2 * time.Second // each, at least
	longestKey    = 1 << 10
	quietKeys     = 10
)

func testMemoryBound(t *testing.T, size int64) {
	f := newFleet(t, 3, `policies:
  - {name: quiet, algorithm: fixed_window, limit: 1000000000, window: 24h, on_error: closed}
  - {name: flood, algorithm: token_bucket, limit: 10, window: 10s, on_error: closed}
  - {name: kept, algorithm: sliding_log, limit: 10, window: 24h, on_error: closed}
`, nil)
	groups := make([]*cgroup, len(f.members))
	for i, m := range f.members {
		groups[i] = newCgroup(t, size)
		m.wrapper = groups[i].inside()
	}
	f.start(f.members...)
	f.calm(f.members...)
	target := f.members[0]
	page := target.metrics()
	got, want := int64(page.value("go_gc_gomemlimit_bytes")), size/100*90
	expect.Equal(t, got, want, "go_gc_gomemlimit_bytes")
	kinds := map[string]func(*flood){
		"keys":    (*flood).keys,
		"streams": (*flood).streams,
		"unread":  (*flood).unread,
		"long":    (*flood).long,
		"halves":  (*flood).halves,
	}
	for _, what := range []string{"keys", "streams", "unread", "long", "halves", "all"} {
		fl := &flood{t: t, size: size, to: target, counts: make(map[string]int64)}
		ctx, stop := context.WithCancel(t.Context())
		fl.ctx = ctx
		fl.probe()
		began := time.Now()
		if what == "all" {
			for _, run := range kinds {
				run(fl)
			}
		} else {
			kinds[what](fl)
		}
		if what == "keys" { // the others begin with as much state as there may be
			eventually(t, max(1, time.Duration(size>>29))*2*waitTimeout, what+": new keys to find no room",
				func() bool {
					if target.ended() {
						return true
					}
					page := target.metrics()
					return page.value("weir_state_bytes") > page.value("weir_state_bytes_max")*4/5
				})
		}
		select {
		case <-time.After(floodFor):
		case <-target.done:
		}
		defer func() {
			if t.Failed() {
				t.Logf("%s: others' checks answered %d; counts %v", what, fl.quiet.Load(), fl.all())
			}
		}()
		eventually(t, 2*waitTimeout, what+": others to be answered",
			func() bool { return fl.quiet.Load() >= quietKeys || target.ended() })
		took := time.Since(began)
		stop()
		fl.work.Wait()
		fl.close()
		for i, g := range groups {
			n := g.kills()
			must.True(t, n <= 0, "%s: %s was killed for its size; counts %v", what, f.members[i].name, fl.all())
		}
		recovered := eventually(t, recoverWithin, what+": the node to be as before", func() bool {
			for i := range 50 {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				d, err := target.checkGRPC(ctx, "quiet", quietKey(i))
				cancel()
				if err != nil || !d.Allowed || d.FailedClosed {
					return false
				}
			}
			return true
		})
		now := target.footprint()
		t.Logf("%s for %v: %d MiB of %d at its peak (others %d, %d), heap %d MiB, state %d MiB, %d keys; others' checks answered %d, slowest %v; recovered in %v; counts %v", what, took.Round(time.Millisecond),
			groups[0].peak()>>20, size>>20, groups[1].peak()>>20, groups[2].peak()>>20, now.heap>>20,
			int64(target.metrics().value("weir_state_bytes"))>>20, now.keys, fl.quiet.Load(),
			time.Duration(fl.slowest.Load()), recovered, fl.all())
	}
	// All are there still. Copies may be missing: full stores have no room for them.
	for _, m := range f.members {
		eventually(t, waitTimeout, m.name+" to see all others", func() bool {
			st, err := m.overview()
			if err != nil || !st.Ready || len(st.Members) != len(f.members) {
				return false
			}
			for _, other := range st.Members {
				if other.State != "active" || !other.Reachable {
					return false
				}
			}
			return true
		})
	}
}

func quietKey(i int) string { return "quiet-" + strconv.Itoa(i%quietKeys) }

// ended tells whether the process has.
func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// flood is hostile callers of one node.
type flood struct {
	t    *testing.T
	size int64
	to   *member
	ctx  context.Context
	work sync.WaitGroup
	key  atomic.Uint64 // the last made up

	quiet, slowest atomic.Int64

	mu     sync.Mutex
	counts map[string]int64
	conns  []io.Closer
}

func (f *flood) add(what string, n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[what] += n
}

func (f *flood) all() map[string]int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.counts)
}

// dial returns a client on a connection of its own.
func (f *flood) dial() weirv1.LimiterClient {
	conn := must.Value(grpc.NewClient("passthrough:///"+f.to.grpcAddr(),
		grpc.WithTransportCredentials(insecure.NewCredentials())))(f.t)
	f.mu.Lock()
	f.conns = append(f.conns, conn)
	f.mu.Unlock()
	return weirv1.NewLimiterClient(conn)
}

func (m *member) grpcAddr() string { return m.ip + ":" + fleetGRPC }

func (f *flood) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		_ = c.Close()
	}
}

// pause waits before another attempt.
func (f *flood) pause() {
	select {
	case <-time.After(20 * time.Millisecond):
	case <-f.ctx.Done():
	}
}

// probe asks as an ordinary caller does, one check after another.
func (f *flood) probe() {
	client := f.dial()
	ask := func(i int) error {
		ctx, cancel := context.WithTimeout(f.ctx, 10*time.Second)
		defer cancel()
		_, err := client.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{
			{Target: &weirv1.Target{Policy: "quiet", Key: quietKey(i)}},
		}})
		return err
	}
	for i := range quietKeys { // the connection and the keys are there before the others
		must.NoError(f.t, ask(i))
	}
	f.work.Go(func() {
		for i := 0; f.ctx.Err() == nil; i++ {
			began := time.Now()
			err := ask(i)
			if f.ctx.Err() != nil {
				return
			}
			if err != nil {
				f.add("quiet: "+err.Error(), 1)
			} else {
				f.quiet.Add(1)
			}
			took := int64(time.Since(began))
			for was := f.slowest.Load(); took > was && !f.slowest.CompareAndSwap(was, took); was = f.slowest.Load() {
			}
			f.pause()
		}
	})
}

// request makes one of so many checks of new keys of a length.
func (f *flood) request(in *weirv1.CheckStreamRequest, checks, length int) {
	if in.Keys == nil {
		in.Keys = bytes.Repeat([]byte{'k'}, checks*length)
		in.KeyLengths = make([]uint32, checks)
		for i := range in.KeyLengths {
			in.KeyLengths[i] = uint32(length)
		}
	}
	in.Sequence++
	last := f.key.Add(uint64(checks))
	const digits = "0123456789abcdef"
	for i := range checks {
		n := last - uint64(i)
		for j := range 16 {
			in.Keys[i*length+j] = digits[n>>(4*j)&15]
		}
	}
}

// stream opens a CheckStream and sends on it for as long as it lasts, over and over.
func (f *flood) stream(what string, client weirv1.LimiterClient, policy string, checks, length int, read bool) {
	f.work.Go(func() {
		in := new(weirv1.CheckStreamRequest)
		for ; f.ctx.Err() == nil; f.pause() {
			ctx, cancel := context.WithCancel(f.ctx)
			s, err := client.CheckStream(ctx)
			if err != nil {
				cancel()
				f.add(what+": not opened", 1)
				continue
			}
			var reader sync.WaitGroup
			if read {
				reader.Go(func() {
					for {
						out, err := s.Recv()
						if err != nil {
							return
						}
						f.add(what+": answers", int64(max(len(out.Checks), 1)))
					}
				})
			}
			in.Define = []*weirv1.StreamTarget{{Policy: policy}}
			for err == nil {
				f.request(in, checks, length)
				err = s.Send(in)
				f.add(what+": requests", 1)
				in.Define = nil
			}
			cancel()
			reader.Wait()
			f.add(what+": ended", 1)
		}
	})
}

// keys makes up keys that stay, by the batch.
func (f *flood) keys() {
	for range 8 {
		client := f.dial()
		for range 2 {
			f.stream("keys", client, "kept", 500, longestKey/2, true)
		}
	}
}

// streams sends more than the node carries: on one connection with 64 streams, and on many.
func (f *flood) streams() {
	client := f.dial()
	for range 64 {
		f.stream("streams of one", client, "flood", 1000, 18, true)
	}
	for range 100 {
		client := f.dial()
		for range 2 {
			f.stream("streams of many", client, "flood", 200, 18, true)
		}
	}
}

// unread asks and does not read.
func (f *flood) unread() {
	for range 16 {
		client := f.dial()
		for range 64 {
			f.stream("unread", client, "flood", 1000, 18, false)
		}
	}
}

// long sends the longest keys.
func (f *flood) long() {
	client := f.dial()
	for range 64 {
		f.stream("long", client, "flood", 1000, longestKey, true)
	}
}

// halves sends all but the end of the longest messages.
func (f *flood) halves() {
	for i := range 16 {
		transport := &http.Transport{Protocols: new(http.Protocols)}
		transport.Protocols.SetUnencryptedHTTP2(i%2 == 0)
		transport.Protocols.SetHTTP1(i%2 != 0)
		f.work.Go(func() {
			<-f.ctx.Done()
			transport.CloseIdleConnections()
		})
		for range 32 {
			f.work.Go(func() {
				for ; f.ctx.Err() == nil; f.pause() {
					if i%2 == 0 {
						f.half(transport, "http://"+f.to.grpcAddr()+"/weir.v1.Limiter/CheckStream", "application/grpc")
					} else {
						f.half(transport, "http://"+f.to.http+"/v1/checks", "application/json")
					}
				}
			})
		}
	}
}

func (f *flood) half(transport *http.Transport, url, contentType string) {
	const message = 4 << 20
	head := []byte{0}
	head = append(head, message>>24&0xff, message>>16&0xff, message>>8&0xff, message&0xff)
	if contentType == "application/json" {
		head = []byte(`{"checks":[`)
	}
	body := io.MultiReader(bytes.NewReader(head), io.LimitReader(spaces{}, message-100), until{f.ctx})
	req := must.Value(http.NewRequestWithContext(f.ctx, "POST", url, body))(f.t)
	req.Header.Set("Content-Type", contentType)
	req.Header.Set("TE", "trailers")
	f.add("halves: requests", 1)
	resp, err := transport.RoundTrip(req)
	if err != nil {
		f.add("halves: ended", 1)
		return
	}
	f.add(fmt.Sprintf("halves: %d %s", resp.StatusCode, resp.Header.Get("Grpc-Status")), 1)
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
}

// spaces are without end.
type spaces struct{}

// Read implements io.Reader.
func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// until reads nothing until a context is done.
type until struct{ ctx context.Context }

// Read implements io.Reader.
func (u until) Read([]byte) (int, error) {
	<-u.ctx.Done()
	return 0, io.ErrUnexpectedEOF
}
