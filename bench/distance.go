package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"
)

// oneWay is how far apart nodes are that are to be far apart.
const oneWay = 5 * time.Millisecond

// far are the loopback addresses that nodes tell each other. What is sent there arrives after oneWay at the port of the
// same number on 127.0.0.1, where the nodes really listen.
func far(i int) string { return "127.0.0." + strconv.Itoa(2+i) }

// startFar starts two nodes that are oneWay apart from one another. Callers are not.
func (b *bench) startFar(ctx context.Context) (*weirCluster, error) {
	ports, err := freePorts(4)
	if err != nil {
		return nil, err
	}
	gossip, peer := func(i int) string { return strconv.Itoa(ports[2*i]) }, func(i int) string { return strconv.Itoa(ports[2*i+1]) }
	var args [][]string
	for i := range 2 {
		// Gossip is not delayed: nothing here depends on it, and its time-outs are for another day.
		for port, delay := range map[string]time.Duration{gossip(i): 0, peer(i): oneWay} {
			if err := relayTCP(ctx, net.JoinHostPort(far(i), port), net.JoinHostPort("127.0.0.1", port), delay); err != nil {
				return nil, err
			}
		}
		if err := relayUDP(ctx, net.JoinHostPort(far(i), gossip(i)), net.JoinHostPort("127.0.0.1", gossip(i))); err != nil {
			return nil, err
		}
		own := []string{"--advertise", far(i), "--gossip-port", gossip(i), "--peer-port", peer(i)}
		if i > 0 {
			own = append(own, "--join", net.JoinHostPort(far(0), gossip(0)))
		}
		args = append(args, own)
	}
	return b.startOwn(ctx, 2, args...)
}

// startEchoFar returns the echo as it is across the distance. The process is the one that echo has.
func (b *bench) startEchoFar(ctx context.Context) (*floor, error) {
	near, err := b.echo()
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(near.address)
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort(far(0), port)
	if err := relayTCP(ctx, address, near.address, oneWay); err != nil {
		return nil, err
	}
	f := &floor{address: address, servers: near.servers}
	clients, err := limiterClients(address)
	f.clients = append(f.clients, clients)
	return f, err
}

// relayTCP passes connections on, everything delayed in both directions, until ctx ends.
func relayTCP(ctx context.Context, from, to string, delay time.Duration) error {
	l, err := net.Listen("tcp", from)
	if err != nil {
		return fmt.Errorf("cannot put a distance between nodes: %w", err)
	}
	context.AfterFunc(ctx, func() { l.Close() })
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer near.Close()
				away, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer away.Close()
				stop := context.AfterFunc(ctx, func() { near.Close(); away.Close() })
				defer stop()
				var both sync.WaitGroup
				both.Go(func() { carry(away, near, delay); away.Close() })
				both.Go(func() { carry(near, away, delay); near.Close() })
				both.Wait()
			}()
		}
	}()
	return nil
}

// carry copies what it reads, each piece after the delay, however many are in flight, and returns when either end is
// closed.
func carry(to io.Writer, from io.Reader, delay time.Duration) {
	type piece struct {
		b   []byte
		due time.Time
	}
	pieces := make(chan piece, 1024)
	over := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		defer close(over)
		for p := range pieces {
			time.Sleep(time.Until(p.due))
			if _, err := to.Write(p.b); err != nil {
				return
			}
		}
	})
	defer writer.Wait()
	defer close(pieces)
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			select {
			case pieces <- piece{append([]byte(nil), buffer[:n]...), time.Now().Add(delay)}:
			case <-over:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// relayUDP passes datagrams on until ctx ends; answers find back to whoever sent the question.
func relayUDP(ctx context.Context, from, to string) error {
	var conf net.ListenConfig
	l, err := conf.ListenPacket(ctx, "udp", from)
	if err != nil {
		return fmt.Errorf("cannot put a distance between nodes: %w", err)
	}
	context.AfterFunc(ctx, func() { l.Close() })
	go func() {
		senders := make(map[string]net.Conn)
		buffer := make([]byte, 64<<10)
		for {
			n, sender, err := l.ReadFrom(buffer)
			if err != nil {
				return
			}
			c := senders[sender.String()]
			if c == nil {
				if c, err = net.Dial("udp", to); err != nil {
					continue // datagrams may be lost
				}
				context.AfterFunc(ctx, func() { c.Close() })
				senders[sender.String()] = c
				go func() {
					back := make([]byte, 64<<10)
					for {
						n, err := c.Read(back)
						if err != nil && ctx.Err() != nil {
							return
						}
						if err == nil {
							_, _ = l.WriteTo(back[:n], sender)
						} else {
							wait(ctx, time.Millisecond) // nobody listens there yet
						}
					}
				}()
			}
			_, _ = c.Write(buffer[:n])
		}
	}()
	return nil
}
