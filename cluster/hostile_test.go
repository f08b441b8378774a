package cluster

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"runtime/metrics"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-msgpack/v2/codec"
	"github.com/hashicorp/memberlist"

	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// message packs what the gossip library calls one.
func message(kind byte, body any) []byte {
	b := bytes.NewBuffer([]byte{kind})
	if err := codec.NewEncoder(b, &codec.MsgpackHandle{}).Encode(body); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// aliveMessage says that a process is there.
func aliveMessage(n node, incarnation uint32) []byte {
	ip := n.addr.Addr().AsSlice()
	return message(4, struct {
		Incarnation uint32
		Node        string
		Addr        []byte
		Port        uint16
		Meta        []byte
		Vsn         []byte
	}{incarnation, n.identity.String(), ip, n.addr.Port(), n.encode(), []byte{1, 5, 2, 2, 5, 4}})
}

// seal encrypts as the library does; with no key it leaves b as it is.
func seal(key, b, additional []byte, version byte) []byte {
	if key == nil {
		return b
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err)
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	nonce := make([]byte, sealNonce)
	return append(append([]byte{version}, nonce...), gcm.Seal(nil, nonce, b, additional)...)
}

// keysOf are the keys of a node with this one, or of one in plain text.
func keysOf(key []byte) (keys [][]byte) {
	if key != nil {
		keys = append(keys, key)
	}
	return keys
}

// sealStream does so for a stream.
func sealStream(key, b []byte, version byte) []byte {
	head := binary.BigEndian.AppendUint32([]byte{typeEncrypted}, uint32(len(b)+1+sealNonce+sealTag))
	return append(head, seal(key, b, head, version)...)
}

// invented is a process that is not there, and says that it is of this cluster.
func invented(name string, boot uint64, addr string) node {
	return node{identity{name, boot}, netip.MustParseAddrPort(addr), metadata{
		Protocol: protocol, State: Active, Settings: ring.SettingsFingerprint(ring.HashKey{}), Peer: 1, HTTP: 2,
		GRPC: 3,
	}}
}

// sender sends packets to a node.
func (n testNode) sender(t *testing.T, key []byte) func([]byte) {
	t.Helper()
	c := must.Value(net.Dial("udp", n.gossip()))(t)
	t.Cleanup(func() { c.Close() })
	return func(b []byte) {
		expect.NoError(t, expect.Err(c.Write(seal(key, b, nil, sealVersion))))
	}
}

// Who can write gossip can invent members: none of them takes a partition, and the log stays short.
func TestInventedMembers(t *testing.T) {
	t.Parallel()
	for _, key := range [][]byte{nil, bytes.Repeat([]byte{7}, 32)} {
		t.Run(fmt.Sprint("encrypted ", key != nil), func(t *testing.T) {
			t.Parallel()
			keyed := func(c *Config) { c.Keys = keysOf(key) }
			var refused atomic.Int64
			cfg := config("a")
			cfg.Rejected = func(reason string) {
				if reason == Unverified {
					refused.Add(1)
				}
			}
			a := startNode(t, cfg, keyed)
			b := startNode(t, config("b", a.gossip()), keyed)
			c := startNode(t, config("c", a.gossip()), keyed)
			agree(t, a, b, c)
			send := a.sender(t, key)
			const many = 300
			pace := time.NewTicker(10 * time.Millisecond)
			defer pace.Stop()
			i := 0
			testkit.Eventually(t, "all invented members have been asked in vain", func() bool {
				<-pace.C       // a flood that fills the socket's buffer is another matter
				for range 10 { // again and again: packets get lost, and a thief is persistent
					n := invented(fmt.Sprint("x", i%many), 1<<63,
						fmt.Sprintf("127.0.%d.%d:7946", 1+i%many/250, 1+i%many%250))
					send(aliveMessage(n, 1))
					i++
				}
				return refused.Load() >= many
			})
			agree(t, a, b, c)
			// The library would look for each of those that it lists, and for the others less often.
			testkit.Eventually(t, "three members alone",
				func() bool { return len(a.View().Members) == 3 && a.list.NumMembers() == 3 })
			lines := 0
			for line := range strings.Lines(a.log.String()) {
				if !strings.Contains(line, "level=DEBUG") && strings.Contains(line, `msg="process `) {
					lines++
				}
			}
			expect.True(t, lines != 0 && lines <= 2*strangerLines, "%d lines about them", lines)
			// Members come and go as ever.
			d := startNode(t, config("d", a.gossip()), keyed)
			agree(t, a, b, c, d)
			d.Close()
			agree(t, a, b, c)
			noFatal(t, a, b, c)
		})
	}
}

// Nothing that gossip says ends a node: neither that its name is another's, nor that it is refused.
func TestGossipEndsNobody(t *testing.T) {
	t.Parallel()
	a := startNode(t, config("a"), func(c *Config) { c.ConflictTimeout = 50 * time.Millisecond })
	b := startNode(t, config("b", a.gossip()), func(c *Config) { c.ConflictTimeout = 50 * time.Millisecond })
	agree(t, a, b)
	send := a.sender(t, nil)
	namesake := invented("a", math.MaxUint64, "127.0.0.9:7946")
	atOurs := namesake
	atOurs.addr = netip.MustParseAddrPort(a.gossip())
	atB := namesake
	atB.addr, atB.Peer = netip.MustParseAddrPort(b.gossip()), uint16(b.cfg.PeerPort)
	foreign := invented("z", 1<<63, "127.0.0.9:7946")
	foreign.Settings++
	ourselves := invented("a", a.self.boot, a.gossip())
	ourselves.State = Leaving
	failures := func() int {
		a.prober.mu.Lock()
		defer a.prober.mu.Unlock()
		return a.prober.v.candidates[namesake.claim()].failed() + a.prober.v.candidates[atB.claim()].failed()
	}
	testkit.Eventually(t, "the namesake has been looked for at both places", func() bool {
		for i, n := range []node{namesake, atOurs, atB, foreign, ourselves} {
			send(aliveMessage(n, uint32(100+i)))
		}
		return failures() >= 4
	})
	agree(t, a, b)
	v := a.View()
	expect.True(t, v.Self.State == Active && v.Detail == "", "a is %v, %q", v.Self.State, v.Detail)
	noFatal(t, a, b)

	// A node that is joining is told that it is refused, by one that is not there: it joins when it can.
	c := startNode(t, config("c", local(freePorts(t, 1)[0])))
	send = c.sender(t, nil)
	testkit.Eventually(t, "it has heard of the refusal", func() bool {
		send(aliveMessage(foreign, 1))
		_, detail := c.Ready()
		return strings.Contains(detail, "another cluster secret")
	})
	testkit.Eventually(t, "and, when it hears no more of it, goes its way",
		func() bool { return c.View().Self.State == Active })
	noFatal(t, c)
}

func (k *candidate) failed() int {
	if k == nil {
		return 0
	}
	return k.failures
}

// A process under our name that was there, and of which only gossip says that it still is, ends nobody.
func TestRivalThatIsGone(t *testing.T) {
	t.Parallel()
	a := startNode(t, config("a"))
	b := startNode(t, config("b", a.gossip()))
	agree(t, a, b)
	second := startNode(t, config("b", a.gossip()),
		func(c *Config) { c.ConflictTimeout, c.SeedTimeout = 3*time.Second, patience })
	testkit.Eventually(t, "the second sees the first",
		func() bool { _, detail := second.Ready(); return strings.Contains(detail, "in use") })
	answerAt(b.cfg.PeerPort, nil) // though its gossip goes on
	testkit.Eventually(t, "the second takes the name", func() bool { return second.View().Self.State == Active })
	noFatal(t, second)
}

// A process that answers on its peer port, and whose gossip nobody reaches, is no member, and keeps no member's place.
func TestVerifiedWithoutGossip(t *testing.T) {
	t.Parallel()
	a := startNode(t, config("a"))
	n := invented("x", 1<<63, local(freePorts(t, 1)[0]))
	n.Peer = uint16(newPeerPort())
	x := &Cluster{self: n}
	x.view.Store(newView(nil, n.member(), nil))
	answerAt(int(n.Peer), x)
	send := a.sender(t, nil)
	testkit.Eventually(t, "it has answered, and could not be taken in", func() bool {
		a.prober.mu.Lock()
		defer a.prober.mu.Unlock()
		if a.prober.v.candidates[n.claim()] == nil {
			send(aliveMessage(n, 1)) // once, but for packets that are lost: the library would take a second one
		}
		return strings.Contains(a.log.String(), `msg="membership exchange failed" member=x`)
	})
	testkit.Eventually(t, "it is no member", func() bool {
		a.prober.mu.Lock()
		defer a.prober.mu.Unlock()
		return len(a.prober.v.members) == 0 && len(a.View().Members) == 1
	})
	noFatal(t, a)
}

// What a holder of the gossip key can encrypt does not end a node: the library takes the first byte of nothing, and
// trusts padding.
func TestSealedNonsense(t *testing.T) {
	t.Parallel()
	key := bytes.Repeat([]byte{7}, 32)
	a := startNode(t, config("a"), func(c *Config) { c.Keys = [][]byte{key} })
	send := a.sender(t, key)
	udp := must.Value(net.Dial("udp", a.gossip()))(t)
	defer udp.Close()
	send(nil)
	for _, text := range [][]byte{nil, {0}, {255}, bytes.Repeat([]byte{255}, 16)} {
		for _, version := range []byte{0, 1} {
			udp.Write(seal(key, text, nil, version))
			c, err := net.Dial("tcp", a.gossip())
			must.NoError(t, err)
			c.Write(sealStream(key, text, version))
			c.SetReadDeadline(time.Now().Add(patience))
			_, err = c.Read(make([]byte, 1))
			expect.True(t, err != nil, "version %d, %x: it is answered", version, text)
			c.Close()
		}
	}
	agree(t, a, startNode(t, config("b", a.gossip()), func(c *Config) { c.Keys = [][]byte{key} }))
}

// A process with the gossip key that this node connects to, such as at the address of a seed, does not end this node by
// what it answers.
func TestHostileAnswers(t *testing.T) {
	t.Parallel()
	type header struct {
		Nodes        int
		UserStateLen int
		Join         bool
	}
	key := bytes.Repeat([]byte{7}, 32)
	var answers [][]byte
	long, large := header{Nodes: 1 << 20}, header{UserStateLen: 1 << 24}
	for _, text := range [][]byte{nil, {0}, {255}, message(typePushPull, long), message(typePushPull, large)} {
		answers = append(answers, sealStream(key, text, 0), sealStream(key, text, sealVersion), text)
	}
	seed := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer seed.Close()
	var asked atomic.Int64
	go func() {
		for {
			conn, err := seed.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write(answers[int(asked.Load())%len(answers)])
			conn.Close()
			asked.Add(1)
		}
	}()
	keyed := func(c *Config) { c.Keys = [][]byte{key} }
	a := startNode(t, config("a", seed.Addr().String()), keyed)
	for range answers {
		_, err := a.list.Join([]string{seed.Addr().String()})
		expect.True(t, err != nil, "a seed that makes no sense is joined")
	}
	expect.True(t, asked.Load() >= int64(len(answers)), "%d answers", asked.Load())
	agree(t, a, startNode(t, config("b", a.gossip()), keyed))
}

// Strangers at the gossip port take a bounded amount of memory, with a key or without, and members go on.
func TestHostileConnections(t *testing.T) {
	for _, key := range [][]byte{nil, bytes.Repeat([]byte{7}, 32)} {
		t.Run(fmt.Sprint("encrypted ", key != nil), func(t *testing.T) {
			keyed := func(c *Config) { c.Keys = keysOf(key) }
			a := startNode(t, config("a"), keyed)
			b := startNode(t, config("b", a.gossip()), keyed)
			agree(t, a, b)
			before := heap()
			var most, sent, opened atomic.Int64
			stop := make(chan struct{})
			var attack sync.WaitGroup
			for i := range 200 {
				from := &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+i/4))} // four of each
				attack.Go(func() {
					for {
						hostile(from, a.gossip(), key != nil, &sent)
						opened.Add(1)
						select { // the machine's processors are the test's, too
						case <-stop:
							return
						case <-time.After(100 * time.Millisecond):
						}
					}
				})
			}
			for i := range 5 {
				testkit.Eventually(t, "more hostile connections", func() bool {
					most.Store(max(most.Load(), heap()-before))
					return opened.Load() > int64(400*(i+1))
				})
				b.SetPolicyHash(uint32(1000 + i))
				testkit.Eventually(t, "news pass",
					func() bool { m := a.View().Member("b"); return m != nil && m.PolicyHash == uint32(1000+i) })
			}
			c := startNode(t, config("c", a.gossip()), keyed)
			agree(t, a, b, c)
			close(stop)
			attack.Wait()
			t.Logf("%d connections sent %d MiB; the heap grew by %d MiB at most", opened.Load(), sent.Load()>>20,
				most.Load()>>20)
			expect.True(t, most.Load() <= 64<<20, "the heap grew by %d MiB", most.Load()>>20)
			noFatal(t, a, b, c)
			testkit.Eventually(t, "their places are free again", func() bool {
				tr := a.transportOf()
				tr.mu.Lock()
				defer tr.mu.Unlock()
				return tr.strangers == 0
			})
		})
	}
}

var hostileBytes = make([]byte, 64<<10)

// hostile sends what claims to be a list of 19 MiB, or one that is just not too long, for as long as somebody takes it.
func hostile(from *net.TCPAddr, to string, encrypted bool, sent *atomic.Int64) {
	d := net.Dialer{LocalAddr: from, Timeout: patience}
	c, err := d.Dial("tcp", to)
	if err != nil {
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	size := []int{19 << 20, maxList(DefaultMaxMembers) - streamHeader}[from.IP[15]%2]
	head := message(typePushPull, struct {
		Nodes        int
		UserStateLen int
		Join         bool
	}{1, size * int(1-from.IP[15]%2), true})
	if encrypted {
		head = append(binary.BigEndian.AppendUint32([]byte{typeEncrypted}, uint32(size)), sealVersion)
	}
	if _, err := c.Write(head); err != nil {
		return
	}
	for n := 1; n < size; n += len(hostileBytes) {
		w, err := c.Write(hostileBytes[:min(len(hostileBytes), size-n)])
		sent.Add(int64(w))
		if err != nil {
			return
		}
	}
	io.Copy(io.Discard, c)
}

// heap returns the bytes of objects in the heap, dead ones included.
func heap() int64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return int64(s[0].Value.Uint64())
}

// transportOf returns the node's transport.
func (n testNode) transportOf() *transport { return n.bounds }

// Nobody takes all places: neither one stranger those of all others, nor all strangers those of known addresses.
func TestPlaces(t *testing.T) {
	t.Parallel()
	tr, err := listen(t.Context(), Config{}.withDefaults(), nil, newGossipLog(slog.New(slog.DiscardHandler), func() {}))
	must.NoError(t, err)
	defer tr.Shutdown()
	var taken []net.Conn
	enter := func(ip string) bool {
		near, far := net.Pipe()
		taken = append(taken, near, far)
		return tr.enter(fromAddr{near, &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}})
	}
	known := func(ip netip.Addr) bool { return ip == netip.MustParseAddr("10.0.0.1") }
	tr.known.Store(&known)
	for i := range 2 * maxStrangersOf {
		expect.Equal(t, enter("10.9.0.1"), i < maxStrangersOf, "connection %d of one stranger", i)
	}
	n := 0
	for i := range 100 {
		if enter(fmt.Sprintf("10.8.0.%d", i)) {
			n++
		}
	}
	expect.Equal(t, n, maxStrangers-maxStrangersOf, "more strangers")
	for i := range maxStreamsOfOne + 1 {
		expect.Equal(t, enter("10.0.0.1"), i < maxStreamsOfOne, "connection %d of a member", i)
	}
	for _, c := range taken {
		c.Close()
	}
	testkit.Eventually(t, "all places are free", func() bool {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		return tr.strangers == 0 && tr.members == 0 && len(tr.open) == 0
	})
}

// fromAddr is a connection from an address of the test's choice.
type fromAddr struct {
	net.Conn
	from net.Addr
}

func (c fromAddr) RemoteAddr() net.Addr { return c.from }

func TestScreenPackets(t *testing.T) {
	key := bytes.Repeat([]byte{7}, 32)
	ring := must.Value(memberlist.NewKeyring(nil, key))(t)
	alive := aliveMessage(invented("x", 1, "127.0.0.1:1"), 1)
	compound := func(parts ...[]byte) []byte {
		b := []byte{typeCompound, byte(len(parts))}
		for _, p := range parts {
			b = binary.BigEndian.AppendUint16(b, uint16(len(p)))
		}
		return append(b, bytes.Join(parts, nil)...)
	}
	for _, test := range []struct {
		name string
		b    []byte
		want string
	}{
		{"alive", alive, ""},
		{"two", compound(alive, alive), ""},
		{"checksummed", append([]byte{typeChecksummed, 0, 0, 0, 0}, alive...), ""},
		{"nack", message(typeNack, struct{ SeqNo uint32 }{1}), ""},
		{"nothing", []byte{}, Malformed},
		{"compressed", []byte{9, 1, 2, 3}, Malformed},
		{"compressed among others", compound(alive, []byte{9, 1, 2, 3}), Malformed},
		{"of the user", []byte{8, 1}, Malformed},
		{"nested", compound(compound(alive)), Malformed},
		{"cut", compound(alive, alive)[:20], Malformed},
		{"labelled", []byte{244, 1, 'x', 0}, Malformed},
		{"too long", append(bytes.Clone(alive), make([]byte, maxPacket)...), Malformed},
	} {
		expect.Equal(t, (screen{members: 4}).packet(test.b), test.want, "%s", test.name)
		want := test.want
		if len(test.b) == 0 {
			want = OtherKey // there is nothing to be sealed
		}
		expect.Equal(t, (screen{ring, 4}).packet(seal(key, test.b, nil, sealVersion)), want, "%s, sealed", test.name)
		got := (screen{ring, 4}).packet(seal(key, test.b, nil, 0))
		expect.True(t, got != "", "%s, sealed with padding: let in", test.name)
	}
	expect.Equal(t, (screen{ring, 4}).packet(alive), OtherKey, "plain text")
}

func FuzzScreenPacket(f *testing.F) {
	alive := aliveMessage(invented("x", 1, "127.0.0.1:1"), 1)
	f.Add(alive)
	f.Add(append([]byte{typeCompound, 1, 0, byte(len(alive))}, alive...))
	f.Add([]byte{typeChecksummed, 0, 0, 0, 0, 0})
	key := bytes.Repeat([]byte{7}, 32)
	ring := must.Value(memberlist.NewKeyring(nil, key))(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		plain := (screen{members: 4}).packet(b)
		sealed := (screen{ring, 4}).packet(seal(key, b, nil, sealVersion))
		expect.True(t, (plain == "") == (sealed == "") || len(b) > maxPacket-minSealed,
			"%x: plain %q, sealed %q", b, plain, sealed)
		expect.True(t, (screen{ring, 4}).packet(b) != "", "%x passes for sealed", b)
	})
}

func FuzzScreenStream(f *testing.F) {
	list := message(typePushPull, struct {
		Nodes        int
		UserStateLen int
		Join         bool
	}{2, 0, true})
	f.Add(list)
	f.Add([]byte{typePing, 0x80})
	f.Add([]byte{typeEncrypted, 0, 0, 1, 0, 1})
	key := bytes.Repeat([]byte{7}, 32)
	ring := must.Value(memberlist.NewKeyring(nil, key))(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, s := range []struct {
			screen
			sent []byte
		}{{screen{members: 4}, b}, {screen{ring, 4}, sealStream(key, b, sealVersion)}, {screen{ring, 4}, b}} {
			rest, reason := s.stream(bytes.NewReader(s.sent), isAsked)
			if rest == nil {
				continue
			}
			got, err := io.ReadAll(rest)
			expect.True(t, reason == "" && err == nil && len(got) <= maxList(4) && bytes.HasPrefix(s.sent, got),
				"%x: reason %q, %v, %d bytes that were not sent", b, reason, err, len(got))
		}
	})
}

// Whatever gossip says of a process, it does not count, and nothing breaks.
func FuzzAlive(f *testing.F) {
	f.Add("b/8000000000000001", []byte{127, 0, 0, 1}, uint16(7946), invented("b", 1, "127.0.0.1:7946").encode())
	f.Add("a/8000000000000001", []byte{}, uint16(0), []byte("WE"))
	c := &Cluster{cfg: Config{}.withDefaults(), log: slog.New(slog.DiscardHandler), wake: make(chan struct{}, 1),
		ctx: f.Context(), refusals: map[string]bool{}}
	c.self = invented("a", 1, "127.0.0.1:7946")
	c.self.State = Joining
	c.cfg.SettingsFingerprint = c.self.Settings
	c.roster = newRoster(c.self, []string{"seed:7946"})
	c.prober = newProber(c)
	c.view.Store(noView())
	c.publish()
	f.Fuzz(func(t *testing.T, name string, addr []byte, port uint16, meta []byte) {
		n := &memberlist.Node{Name: name, Addr: addr, Port: port, Meta: meta}
		err := delegate{c}.NotifyAlive(n)
		delegate{c}.NotifyJoin(n)
		delegate{c}.NotifyLeave(n)
		for _, do := range c.take() {
			do()
		}
		c.roster.advance()
		expect.True(t, (err != nil || name == c.self.identity.String()) && len(c.roster.others) == 0 &&
			len(c.prober.v.candidates) <= 4*c.cfg.MaxMembers, "%q is taken in: %v", name, err)
	})
}
